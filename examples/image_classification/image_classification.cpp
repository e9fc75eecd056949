// ResNet-18 on Fashion-MNIST with DistributedDataParallel. Every rank trains on its own part of the images and
// evaluates its own part of the test set.
//
//   cmake -S . -B build -DCMAKE_PREFIX_PATH="SHOAL_PREFIX;LIBTORCH" && cmake --build build
//   mkdir fashion; for f in /usr/share/datasets/fashion-mnist/*.gz; do zcat $f > fashion/$(basename $f .gz); done
//   shoal launch -n 2 -- build/image_classification fashion 3
//
// Arguments: folder with the four files of MNIST or Fashion-MNIST, epochs (3), largest number of steps in an epoch
// (all).

#include <shoal/shoal.h>
#include <torch/torch.h>

namespace nn = torch::nn;
namespace data = torch::data;

nn::Conv2d conv(int64_t in, int64_t out, int64_t kernel, int64_t stride) {
  return nn::Conv2d(nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
}

struct BlockImpl : nn::Module {
  BlockImpl(int64_t in, int64_t out, int64_t stride) {
    conv1 = register_module("conv1", conv(in, out, 3, stride));
    bn1 = register_module("bn1", nn::BatchNorm2d(out));
    conv2 = register_module("conv2", conv(out, out, 3, 1));
    bn2 = register_module("bn2", nn::BatchNorm2d(out));
    if (stride != 1 || in != out) {
      downsample = register_module("downsample", nn::Sequential(conv(in, out, 1, stride), nn::BatchNorm2d(out)));
    }
  }

  torch::Tensor forward(const torch::Tensor& x) {
    auto y = torch::relu(bn1(conv1(x)));
    y = bn2(conv2(y));
    return torch::relu(y + (downsample.is_empty() ? x : downsample->forward(x)));
  }

  nn::Conv2d conv1{nullptr}, conv2{nullptr};
  nn::BatchNorm2d bn1{nullptr}, bn2{nullptr};
  nn::Sequential downsample{nullptr};
};
TORCH_MODULE(Block);

struct ResNet18Impl : nn::Module {
  ResNet18Impl(int64_t channels, int64_t classes) {
    body = nn::Sequential(conv(channels, 64, 7, 2), nn::BatchNorm2d(64), nn::ReLU(),
                          nn::MaxPool2d(nn::MaxPool2dOptions(3).stride(2).padding(1)));
    int64_t in = 64;
    for (const int64_t out : {64, 128, 256, 512}) {
      body->push_back(Block(in, out, out == 64 ? 1 : 2));
      body->push_back(Block(out, out, 1));
      in = out;
    }
    register_module("body", body);
    fc = register_module("fc", nn::Linear(512, classes));
  }

  torch::Tensor forward(const torch::Tensor& images) { return fc(body->forward(images).mean({2, 3})); }

  nn::Sequential body;
  nn::Linear fc{nullptr};
};
TORCH_MODULE(ResNet18);

// The fraction of the test images that is classified right. Every rank takes every size()-th image, each image once.
double accuracy(ResNet18 model, const torch::Tensor& images, const torch::Tensor& labels, const shoal::World& world) {
  const torch::NoGradGuard no_grad;
  model->eval();
  shoal::broadcast_coalesced(world.group(), model->buffers(), 0, {.what = "statistics of batch norm"});
  auto counts = torch::zeros({2}, torch::kLong);  // right, all
  for (int64_t begin = world.rank(); begin < images.size(0); begin += 512 * world.size()) {
    const auto part = torch::indexing::Slice(begin, begin + 512 * world.size(), world.size());
    const auto predicted = model->forward(images.index({part})).argmax(1);
    counts[0] += (predicted == labels.index({part})).sum();
    counts[1] += predicted.size(0);
  }
  world.group().all_reduce(counts).wait();
  model->train();
  return counts[0].item<double>() / counts[1].item<double>();
}

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: image_classification FOLDER [EPOCHS] [STEPS]\n");
    return 2;
  }
  const std::string folder = argv[1];
  const int64_t epochs = argc > 2 ? std::stoll(argv[2]) : 3;
  const int64_t batch_size = 64;  // of a rank
  const double mean = 0.2860, deviation = 0.3530;

  const shoal::World world = shoal::init();
  torch::manual_seed(1);
  auto train = data::datasets::MNIST(folder)
                   .map(data::transforms::Normalize<>(mean, deviation))
                   .map(data::transforms::Stack<>());
  const data::datasets::MNIST test(folder, data::datasets::MNIST::Mode::kTest);

  shoal::DistributedSampler sampler(*train.size(), world.group(), {.seed = 1});
  int64_t steps = *train.size() / world.size() / batch_size;  // in an epoch
  if (argc > 3) steps = std::min<int64_t>(steps, std::stoll(argv[3]));

  ResNet18 model(/*channels=*/1, /*classes=*/10);
  shoal::DistributedDataParallel parallel(model, world.group());
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(5e-4));
  shoal::OneCycle schedule(optimizer, {.total_steps = epochs * steps});

  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    sampler.set_epoch(epoch);
    auto loader = data::make_data_loader(train, sampler, data::DataLoaderOptions(batch_size).drop_last(true));
    int64_t step = 0;
    for (auto& batch : *loader) {
      if (step++ == steps) break;
      optimizer.zero_grad();
      auto loss = torch::cross_entropy_loss(parallel.forward(batch.data), batch.target);
      loss.backward();
      optimizer.step();
      schedule.step();
      if (world.rank() == 0 && step % 50 == 0) {
        std::printf("epoch %ld step %ld of %ld: loss %.3f\n", epoch, step, steps, loss.item<double>());
      }
    }
    const double right = accuracy(model, (test.images() - mean) / deviation, test.targets(), world);
    if (world.rank() == 0) std::printf("epoch %ld: accuracy %.4f\n", epoch, right);
  }
}
