#include <shoal/world.h>

int main() {
  shoal::World world = shoal::init();
  world.print0("sum over the ranks:", world.all_reduce(1));
}
