#include "comm/membership/join_board.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <sstream>
#include <stdexcept>

#include "base/printable.h"
#include "comm/rendezvous/rendezvous.h"
#include "shoal/error.h"

namespace shoal {
namespace {

constexpr uint64_t board_magic = 0x314e494f4a4c4148;  // "HALJOIN1"

enum Entry : uint32_t { none, writing, member, knocks, claimed, withdrawn, refusing, refused };

template <size_t room>
void copy_text(char (&target)[room], const std::string& text) {
  const auto length = std::min(text.size(), room - 1);
  std::memcpy(target, text.data(), length);
  target[length] = 0;
}

template <size_t room>
std::string text_of(const char (&text)[room]) {
  return printable({text, strnlen(text, room)});
}

uint64_t random_number() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

}  // namespace

struct JoinPage {
  struct Slot {
    std::atomic<uint32_t> entry;  // written last
    int32_t pid;
    uint64_t start_time;
    int32_t descriptor;
    std::atomic<uint32_t> admitted;
    uint64_t nonce;
    char refusal[512];
  };
  uint64_t magic;
  uint64_t bytes;  // of this struct, which differs between versions
  uint64_t nonce;
  int32_t first_ranks;
  std::atomic<uint32_t> used;  // slots from the first on that may have an entry
  std::atomic<uint32_t> changes;
  std::atomic<uint32_t> published;  // bytes of `text`; 0: none yet
  std::atomic<uint32_t> closed;
  char why_closed[512];
  char text[JoinTable::most_text];
  Slot slots[JoinTable::most_members];
};

namespace {

JoinPage::Slot& slot_of(JoinPage& page, int number) {
  if (number < 0 || number >= JoinTable::most_members) {
    throw UsageError(fmt::format("an elastic job has at most {} processes in its life, and this is number {}",
                                 JoinTable::most_members, number));
  }
  return page.slots[number];
}

void write_entry(JoinPage& page, int number, const Peer& peer, Entry entry) {
  auto& slot = slot_of(page, number);
  slot.pid = peer.process.pid;
  slot.start_time = peer.process.start_time;
  slot.descriptor = peer.page.descriptor;
  slot.nonce = peer.page.nonce;
  slot.entry.store(entry);
  auto used = page.used.load();
  while (used <= static_cast<uint32_t>(number) && !page.used.compare_exchange_weak(used, number + 1)) continue;
  page.changes.fetch_add(1);
}

int used_slots(const JoinPage& page) {
  return static_cast<int>(std::min<uint32_t>(page.used.load(), JoinTable::most_members));
}

}  // namespace

JoinBoard::JoinBoard(std::string job, int first_ranks)
    : job_(std::move(job)),
      file_(shm::MemoryFile::create(sizeof(JoinPage))),
      pid_(getpid()),
      descriptor_(file_.descriptor()),
      page_(reinterpret_cast<JoinPage*>(file_.data())) {
  page_->magic = board_magic;
  page_->bytes = sizeof(JoinPage);
  page_->nonce = random_number();
  page_->first_ranks = first_ranks;
}

JoinBoard::JoinBoard(const std::string& address) : pid_(0), descriptor_(-1), page_(nullptr) {
  std::istringstream in(address);
  uint64_t nonce = 0;
  if (!(in >> pid_ >> descriptor_ >> nonce) || pid_ < 1 || descriptor_ < 0) {
    throw UsageError(fmt::format("{}='{:.100}' is no address that shoal launch --elastic sets: unset it", join_variable,
                                 printable(address)));
  }
  std::getline(in >> std::ws, job_);
  file_ = shm::MemoryFile::open(pid_, descriptor_, sizeof(JoinPage));
  page_ = reinterpret_cast<JoinPage*>(file_.data());
  const bool ranks = page_->first_ranks >= 1 && page_->first_ranks <= most_members;
  if (page_->magic != board_magic || page_->bytes != sizeof(JoinPage) || page_->nonce != nonce || !ranks) {
    throw std::runtime_error(
        fmt::format("process {} holds no table of this job, or one of another version of shoal", pid_));
  }
}

std::string JoinBoard::address() const {
  return fmt::format("{} {} {} {}", pid_, descriptor_, page_->nonce, job_);
}

int JoinBoard::first_ranks() const {
  return page_->first_ranks;
}

void JoinBoard::enter(int number, const Peer& peer) {
  write_entry(*page_, number, peer, member);
}

void JoinBoard::knock(int number, const Peer& peer) {
  uint32_t was = none;
  if (!slot_of(*page_, number).entry.compare_exchange_strong(was, writing)) {
    throw UsageError(fmt::format("number {} of this elastic job was used before: a process joins once", number));
  }
  write_entry(*page_, number, peer, knocks);
}

bool JoinBoard::withdraw(int number) {
  auto& entry = slot_of(*page_, number).entry;
  auto was = entry.load();
  while (was != refusing && was != refused && !entry.compare_exchange_weak(was, withdrawn)) continue;
  return was != claimed;
}

bool JoinBoard::claim(int number) {
  auto& entry = slot_of(*page_, number).entry;
  uint32_t asked = knocks;
  return entry.compare_exchange_strong(asked, claimed) || asked == claimed;  // by a member that has ended since
}

void JoinBoard::release(int number) {
  uint32_t was = claimed;
  slot_of(*page_, number).entry.compare_exchange_strong(was, knocks);
}

void JoinBoard::refuse(int number, const std::string& why) {
  auto& slot = slot_of(*page_, number);
  auto was = slot.entry.load();
  do {
    if (was == refusing || was == refused) return;  // by another member, which writes its reason
  } while (!slot.entry.compare_exchange_weak(was, refusing));
  copy_text(slot.refusal, why);
  slot.entry.store(refused);
}

void JoinBoard::admitted(int number) {
  slot_of(*page_, number).admitted.store(1);
  auto& entry = slot_of(*page_, number).entry;
  auto was = entry.load();
  while ((was == knocks || was == claimed) && !entry.compare_exchange_weak(was, member)) continue;
}

bool JoinBoard::anyone_knocks() const {
  const int used = used_slots(*page_);
  for (int number = first_ranks(); number < used; ++number) {
    const auto entry = page_->slots[number].entry.load();
    if (entry == knocks || entry == claimed) return true;
  }
  return false;
}

std::vector<int> JoinBoard::knocking() const {
  std::vector<int> list;
  const int used = used_slots(*page_);
  for (int number = first_ranks(); number < used; ++number) {
    const auto entry = page_->slots[number].entry.load();
    if (entry == knocks || entry == claimed) list.push_back(number);
  }
  return list;
}

bool JoinBoard::is_refused(int number) const {
  const auto entry = slot_of(*page_, number).entry.load();
  return entry == refusing || entry == refused;
}

std::string JoinBoard::refusal(int number) const {
  const auto& slot = slot_of(*page_, number);
  const auto entry = slot.entry.load();
  if (entry == refusing) return "its reason is not written yet";
  return entry == refused ? text_of(slot.refusal) : "";
}

bool JoinBoard::is_member(int number) const {
  return slot_of(*page_, number).entry.load() == member;
}

bool JoinBoard::was_admitted(int number) const {
  return slot_of(*page_, number).admitted.load() != 0;
}

std::vector<Peer> JoinBoard::peers() const {
  std::vector<Peer> list(static_cast<size_t>(used_slots(*page_)));
  const auto host = host_identity();  // of all, because they open each other's memory through /proc
  for (size_t number = 0; number < list.size(); ++number) {
    const auto& slot = page_->slots[number];
    auto& peer = list[number];
    peer.host = host;
    if (const auto entry = slot.entry.load(); entry == none || entry == writing) continue;
    peer.process = {slot.pid, slot.start_time};
    peer.page = {slot.pid, slot.descriptor, slot.nonce};
  }
  return list;
}

uint64_t JoinBoard::changes() const {
  return page_->changes.load();
}

void JoinBoard::publish(const std::string& description) {
  if (page_->published.load() != 0 || description.empty()) return;
  if (description.size() > most_text) {
    close("the description of its training is too long");
    return;
  }
  std::memcpy(page_->text, description.data(), description.size());
  page_->published.store(static_cast<uint32_t>(description.size()));
}

void JoinBoard::close(const std::string& why) {
  if (page_->closed.load() != 0) return;
  copy_text(page_->why_closed, why);
  page_->closed.store(1);
}

std::optional<std::string> JoinBoard::description() const {
  const auto bytes = page_->published.load();
  if (bytes == 0) return std::nullopt;
  return std::string(page_->text, std::min<size_t>(bytes, most_text));
}

std::string JoinBoard::why_closed() const {
  return page_->closed.load() == 0 ? "" : text_of(page_->why_closed);
}

}  // namespace shoal
