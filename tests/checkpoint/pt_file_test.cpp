// Files of Python's torch.save, read and written; damaged and hostile ones.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <fstream>
#include <iterator>
#include <map>
#include <memory>

#include "checkpoint/format/safetensors.h"
#include "checkpoint/loading/export.h"
#include "checkpoint/loading/reader.h"
#include "checkpoint/loading/reshard.h"
#include "shoal/checkpoint.h"
#include "shoal/error.h"
#include "tests/support/processes.h"
#include "tests/support/refusal.h"
#include "tests/support/temp_folder.h"

namespace shoal::test::pt_file_test {
namespace {

using ::testing::HasSubstr;

void python(const std::string& program, const std::string& path) {
  const auto ended = run({PYTHON, "-c", "import collections, sys, torch\npath = sys.argv[1]\n" + program, path}, 60);
  ASSERT_EQ(ended.code, 0) << ended.output;
}

std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

std::string refusal(const std::string& path) {
  try {
    const CheckpointReader reader(path);
    for (const auto& [name, about] : reader.index().tensors) reader.read(name);
  } catch (const CheckpointError& error) {
    return error.what();
  }
  return "";
}

struct NetImpl : torch::nn::Module {
  NetImpl() {
    convolution = register_module("convolution", torch::nn::Conv2d(2, 3, 2));
    norm = register_module("norm", torch::nn::BatchNorm1d(3));
    norm->running_mean.fill_(0.5);
    norm->num_batches_tracked.fill_(7);
    half = register_parameter("low", at::arange(5, at::kBFloat16));
    nothing = register_parameter("nothing", at::empty({0, 3}));
    scalar = register_parameter("scalar", at::scalar_tensor(2.5, at::kDouble));
    tied = register_parameter("tied", half);
  }
  torch::nn::Conv2d convolution{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  at::Tensor half, nothing, scalar, tied;
};
TORCH_MODULE(Net);

const std::string python_net = R"(
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(2, 3, 2)
        self.norm = torch.nn.BatchNorm1d(3)
        self.low = torch.nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
        self.nothing = torch.nn.Parameter(torch.zeros(0, 3))
        self.scalar = torch.nn.Parameter(torch.zeros((), dtype=torch.double))
        self.tied = self.low
)";

TEST(PtFile, python_loads_what_save_module_writes) {
  const TempFolder folder;
  Net net;
  {
    const torch::NoGradGuard no_grad;
    // In memory as channels-last: the file is row-major.
    net->convolution->weight.set_data(
        at::arange(24, at::kFloat).view({3, 2, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast));
  }
  save_module(folder.file("net.pt"), net);
  python(python_net + R"(
state = torch.load(path)
net = Net()
net.load_state_dict(state)
assert type(state) is collections.OrderedDict
assert torch.equal(net.convolution.weight, torch.arange(24.).view(3, 2, 2, 2))
assert state["convolution.weight"].is_contiguous()
assert torch.equal(net.low, torch.arange(5).bfloat16()) and net.scalar.item() == 2.5
assert net.norm.num_batches_tracked.item() == 7 and net.norm.running_mean.tolist() == [0.5] * 3
assert state["tied"].data_ptr() == state["low"].data_ptr()
)",
         folder.file("net.pt"));
  Net other;
  load_module(folder.file("net.pt"), other);
  EXPECT_TRUE(other->convolution->weight.equal(net->convolution->weight));
  EXPECT_TRUE(other->scalar.equal(net->scalar));
  EXPECT_THROW(save_module(folder.file("net.bin"), net), UsageError);
  EXPECT_THROW(save_module("/dev/null/net.pt", net), CheckpointError);
}

TEST(PtFile, tied_weights_are_loaded_from_all_forms_that_keep_them_twice) {
  const TempFolder folder;
  const Net net;
  save_module(folder.file("net.pt"), *net);
  const CheckpointReader reader(folder.file("net.pt"));
  export_pt(reader, folder.file("again.pt"));
  export_file(reader, folder.file("net.safetensors"));
  reshard(reader, folder.path() / "run", 2);
  for (const auto* name : {"again.pt", "net.safetensors", "run"}) {
    Net other;
    {
      const torch::NoGradGuard no_grad;
      other->half.zero_();
    }
    EXPECT_TRUE(load_module(folder.file(name), other).differences.empty()) << name;
    EXPECT_TRUE(other->half.equal(net->half)) << name;
  }
  python(R"(
state = torch.load(path)
assert state["tied"].data_ptr() == state["low"].data_ptr()
)",
         folder.file("again.pt"));

  NamedTensors untied;
  for (const auto& [name, about] : reader.index().tensors) {
    untied.emplace_back(name, name == "tied" ? reader.read(name) + 1 : reader.read(name));
  }
  save_safetensors(folder.file("untied.safetensors"), untied, {});
  Net other;
  EXPECT_THAT(test::refusal([&] { load_module(folder.file("untied.safetensors"), other); }),
              HasSubstr("extra: tied (not equal to low, with which it is one tensor here)"));
}

TEST(PtFile, state_dicts_of_python_are_loaded) {
  const TempFolder folder;
  python(python_net + R"(
net = Net()
with torch.no_grad():
    for number, parameter in enumerate(net.parameters()):
        parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) + number)
net.to(memory_format=torch.channels_last)
net.norm.running_var.fill_(3)
torch.save(net.state_dict(), path)
torch.save(net.state_dict(), path + ".4.pt", pickle_protocol=4)
)",
         folder.file("net.pt"));
  for (const auto* name : {"net.pt", "net.pt.4.pt"}) {
    Net net;
    load_module(folder.file(name), net);
    int64_t number = 0;
    for (const auto& key : {"low", "nothing", "scalar", "convolution.weight", "convolution.bias", "norm.weight"}) {
      const auto parameter = net->named_parameters()[key];
      EXPECT_TRUE(
          parameter.equal((at::arange(parameter.numel()) + number++).view(parameter.sizes()).to(parameter.dtype())))
          << name << ": " << key;
    }
    EXPECT_TRUE(net->norm->running_var.equal(at::full({3}, 3.0)));
  }
}

TEST(PtFile, nested_dictionaries_views_and_other_values_are_read) {
  const TempFolder folder;
  python(R"(
base = torch.arange(24, dtype=torch.int32)
torch.save({"epoch": 3, "lr": 0.1, "note": "text", "done": True, "none": None, "big": 10**30, "shape": torch.Size([2, 3]),
            "model": {"transposed": base.view(4, 6).t(), "part": base[6:12].view(2, 3), "one": base[5]},
            "state": {0: {"step": torch.tensor(5.)}, 1: [torch.ones(2, dtype=torch.bool), (torch.tensor([1 + 2j]),)]},
            "parameter": torch.nn.Parameter(torch.ones(2)), "wide": torch.tensor([7], dtype=torch.uint16)}, path)
)",
         folder.file("all.pt"));
  const CheckpointReader reader(folder.file("all.pt"));
  const auto base = at::arange(24, at::kInt);
  const std::map<std::string, at::Tensor> expected{
      {"model.transposed", base.view({4, 6}).t()},
      {"model.part", base.slice(0, 6, 12).view({2, 3})},
      {"model.one", base[5]},
      {"state.0.step", at::scalar_tensor(5.0)},
      {"state.1.0", at::ones({2}, at::kBool)},
      {"state.1.1.0", at::full({1}, c10::complex<float>(1, 2), at::kComplexFloat)},
      {"parameter", at::ones({2})},
      {"wide", at::full({1}, 7, at::kUInt16)}};
  ASSERT_EQ(reader.index().tensors.size(), expected.size());
  for (const auto& [name, values] : expected) {
    const auto found = reader.read(name);
    EXPECT_EQ(found.scalar_type(), values.scalar_type()) << name;
    EXPECT_TRUE(found.to(at::kComplexDouble).equal(values.to(at::kComplexDouble))) << name;
  }
  int64_t bytes = 0;
  for (const auto& [name, values] : expected) bytes += static_cast<int64_t>(values.nbytes());
  EXPECT_EQ(reader.verify().bytes, bytes);
}

TEST(PtFile, objects_of_python_are_refused_with_one_sentence) {
  const TempFolder folder;
  python(R"(
import argparse
torch.save({"weight": torch.ones(2), "args": argparse.Namespace(lr=1)}, path)
torch.save(torch.nn.Linear(2, 2), path + ".module.pt")
torch.save(torch.ones(2), path + ".tensor.pt")
torch.save({"weight": torch.ones(2, 1).expand(2, 3)}, path + ".expanded.pt")
torch.save({"a": {"b": torch.ones(2)}, "a.b": torch.ones(2)}, path + ".twice.pt")
torch.jit.script(torch.nn.Linear(2, 2)).save(path + ".script.pt")
torch.save({"weight": torch.ones(2)}, path + ".old.pt", _use_new_zipfile_serialization=False)
z = torch.randn(2, dtype=torch.complex64).conj()
torch.save({"weight": z}, path + ".conj.pt")
torch.save({"weight": z.imag}, path + ".neg.pt")
torch.save({"w": torch.arange(6.).view(2, 3).t(), "w[0:6]": torch.ones(6)}, path + ".slice.pt")
torch.save({"w\udcff": torch.ones(2)}, path + ".bytes.pt")
)",
         folder.file("args.pt"));
  EXPECT_THAT(refusal(folder.file("args.pt")), HasSubstr("args.pt: holds a Python object (argparse Namespace)"));
  EXPECT_THAT(refusal(folder.file("args.pt.module.pt")), HasSubstr("save model.state_dict() in Python"));
  EXPECT_THAT(refusal(folder.file("args.pt.tensor.pt")), HasSubstr("holds no dictionary of tensors"));
  EXPECT_THAT(refusal(folder.file("args.pt.expanded.pt")), HasSubstr("tensor weight has gaps or overlaps"));
  EXPECT_THAT(refusal(folder.file("args.pt.twice.pt")), HasSubstr("tensor a.b occurs twice"));
  EXPECT_THAT(refusal(folder.file("args.pt.script.pt")), HasSubstr("torch::load"));
  EXPECT_THAT(refusal(folder.file("args.pt.old.pt")), HasSubstr("the format before PyTorch 1.6"));
  EXPECT_THAT(refusal(folder.file("args.pt.conj.pt")), HasSubstr("resolve_conj()"));
  EXPECT_THAT(refusal(folder.file("args.pt.neg.pt")), HasSubstr("resolve_neg()"));
  EXPECT_THAT(refusal(folder.file("args.pt.slice.pt")), HasSubstr("two tensors are called"));
  EXPECT_THAT(refusal(folder.file("args.pt.bytes.pt")), HasSubstr("has a name that is no UTF-8"));
}

TEST(PtFile, what_is_no_tensor_with_a_name_is_refused_and_checksums_may_be_left_out) {
  const TempFolder folder;
  python(R"(
tensor = torch.ones(2)
for number, key in enumerate([("layer", 0), 1.5, None, True, 10**30]):
    torch.save({"a": tensor, "inner": {key: [tensor]}}, f"{path}.{number}.pt")
torch.save({"a": tensor, None: {"lr": 1}, ("b", 1): "text"}, path)
torch.save({"a": tensor.to(torch.complex128)}, path + ".wide.pt")
torch.serialization.set_crc32_options(False)
torch.save({"a": tensor}, path + ".without.pt")
)",
         folder.file("keys.pt"));
  EXPECT_THAT(refusal(folder.file("keys.pt.0.pt")), HasSubstr("a tensor in inner lies under a key that is a tuple"));
  for (const auto* number : {"1", "2", "3", "4"}) {
    EXPECT_THAT(refusal(folder.file("keys.pt." + std::string(number) + ".pt")),
                HasSubstr("a tensor in inner lies under a key that is None, a truth value, a float"));
  }
  EXPECT_EQ(refusal(folder.file("keys.pt")), "") << "nothing but a is a tensor";
  EXPECT_THAT(refusal(folder.file("keys.pt.wide.pt")),
              HasSubstr("whose dtype shoal does not read: save it as another"));
  EXPECT_EQ(CheckpointReader(folder.file("keys.pt.without.pt")).verify().unchecked, 8);
}

TEST(PtFile, a_changed_bit_of_a_tensor_is_found_by_all_that_read_the_whole_file) {
  const TempFolder folder;
  const auto layer = std::make_shared<torch::nn::LinearImpl>(40, 30);
  const auto path = folder.file("layer.pt"), damaged = folder.file("damaged.pt");
  save_module(path, *layer);
  auto bytes = bytes_of(path);
  const auto weight = layer->weight.contiguous();
  const auto place = bytes.find(std::string(static_cast<const char*>(weight.data_ptr()), weight.nbytes()));
  ASSERT_NE(place, std::string::npos);
  bytes[place + 1003] = static_cast<char>(bytes[place + 1003] ^ 0x40);
  write(damaged, bytes);
  EXPECT_EQ(CheckpointReader(path).verify().unchecked, 0);
  const auto because = HasSubstr("damaged.pt is damaged: the storage of tensor weight has checksum ");
  EXPECT_THAT(test::refusal<CheckpointError>([&] { CheckpointReader(damaged).verify(); }), because);
  EXPECT_THAT(test::refusal<CheckpointError>([&] { CheckpointReader(damaged).read("weight"); }), because);
  EXPECT_THAT(
      test::refusal<CheckpointError>([&] { export_file(CheckpointReader(damaged), folder.file("x.safetensors")); }),
      because);
  EXPECT_THAT(test::refusal<CheckpointError>([&] { reshard(CheckpointReader(damaged), folder.path() / "run", 2); }),
              because);
  EXPECT_THAT(test::refusal<CheckpointError>([&] { load_module(damaged, *layer); }), because);
  EXPECT_NO_THROW(load_module(damaged, *layer, {.verify = false}));
}

// A zip file with one record, as torch.save would make it of this pickle.
std::string zip_of(const std::string& pickle) {
  const auto number = [](uint64_t value, int bytes) {
    return std::string(reinterpret_cast<const char*>(&value), static_cast<size_t>(bytes));
  };
  const std::string name = "x/data.pkl";
  const auto sizes = number(pickle.size(), 4) + number(pickle.size(), 4) + number(name.size(), 2) + number(0, 2);
  const auto local = "PK\x03\x04" + number(0, 2) + number(0, 2) + number(0, 2) + number(0, 8) + sizes + name + pickle;
  const auto entry =
      "PK\x01\x02" + number(0, 4) + number(0, 2) + number(0, 2) + number(0, 8) + sizes + std::string(14, '\0') + name;
  return local + entry + "PK\x05\x06" + number(0, 4) + number(1, 2) + number(1, 2) + number(entry.size(), 4) +
         number(local.size(), 4) + number(0, 2);
}

TEST(PtFile, pickles_that_grow_when_read_are_refused) {
  const TempFolder folder;
  const auto path = folder.file("bomb.pt");
  // Dictionaries that each hold the one before ten times.
  std::string laughs("\x80\x02}q\0", 5);
  for (char level = 1; level < 30; ++level) {
    laughs += "}(";
    for (char key = '0'; key <= '9'; ++key)
      laughs += std::string("X\1\0\0\0", 5) + key + 'h' + static_cast<char>(level - 1);
    laughs += std::string("uq") + level;
  }
  write(path, zip_of(laughs + "."));
  EXPECT_THAT(refusal(path), HasSubstr("nested beyond all limits"));
  write(path, zip_of(std::string("\x80\x02]q\0h\0a.", 9)));  // a list in itself
  EXPECT_THAT(refusal(path), HasSubstr("nested beyond all limits"));
  write(path, zip_of("\x80\x02(" + std::string(1'500'000, '}') + "l."));
  EXPECT_THAT(refusal(path), HasSubstr("stands for more than 64 MiB"));
  write(path, zip_of("\x80\x02(" + std::string(15'000'000, 'N') + std::string(1'500'000, '}') + "l."));
  EXPECT_THAT(refusal(path), HasSubstr("beyond all limits"));
  write(path, zip_of(std::string("\x80\x02X\xff\xff\xff\x7f", 7)));  // a text of 2 GiB
  EXPECT_THAT(refusal(path), HasSubstr("ends early"));
  // What is recalled costs two bytes each time.
  const std::string endless = std::string("\x80\x02X\0\4\0\0", 7) + std::string(1024, 'n') + std::string("q\0", 2);
  write(path, zip_of(endless + std::string("h\0h\0\x93.", 6)));
  EXPECT_THAT(refusal(path), HasSubstr("an endless name"));
  for (const auto* faulty : {"", ".", "a.", "(.", "h.", "tR.", "\x80\x02}b.", "]}s."}) {
    write(path, zip_of(faulty));
    EXPECT_NE(refusal(path), "") << faulty;
  }
}

TEST(PtFile, damaged_files_are_refused_or_read_within_their_bounds) {
  const TempFolder folder;
  const auto path = folder.file("net.pt");
  save_module(path, Net());
  const auto whole = bytes_of(path);
  int refused = 0, read = 0;
  const auto damaged = folder.file("damaged.pt");
  for (size_t place = 0; place < whole.size(); ++place) {
    auto bytes = whole;
    bytes[place] = static_cast<char>(bytes[place] ^ "\x01\x80\xff"[place % 3]);
    write(damaged, bytes);
    refusal(damaged).empty() ? ++read : ++refused;  // any other exception fails
    if (place % 16 != 0) continue;
    write(damaged, whole.substr(0, place));
    EXPECT_NE(refusal(damaged), "") << "cut at " << place;
  }
  EXPECT_GT(refused, 100);
  EXPECT_GT(read, 100) << "padding has no checksums there";
}

}  // namespace
}  // namespace shoal::test::pt_file_test
