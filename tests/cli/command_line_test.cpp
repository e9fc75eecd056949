// Wrong command lines and wrong input: one clear line and the right exit code, without delay.

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/cli/shoal_program.h"
#include "tests/support/temp_folder.h"

namespace shoal::test::command_line_test {
namespace {

void expect_refused(const std::vector<std::string>& arguments, const std::string& because) {
  const double before = children_seconds();
  const auto ended = shoal(arguments);
  EXPECT_LT(children_seconds() - before, 2);
  EXPECT_EQ(ended.code, 2) << ended.output;
  EXPECT_NE(ended.output.find(because), std::string::npos) << ended.output;
  EXPECT_EQ(std::count(ended.output.begin(), ended.output.end(), '\n'), 1) << "one line: " << ended.output;
}

TEST(CommandLine, wrong_options_are_refused_before_ranks_are_started) {
  expect_refused({"train", "--ranks", "0"}, "--ranks 0: give at least 1");
  expect_refused({"launch", "-n", "2", "--timeout", "10", "--", "true", "--lr", "1"}, "there is no option --timeout");
  expect_refused({"train", "--frobnicate=3"}, "there is no option --frobnicate (");
  expect_refused({"train", "--modle=gpt"}, "there is no option --modle; did you mean --model?");
  expect_refused({"trian", "--model", "gpt"}, "there is no command trian; did you mean train?");
  expect_refused({"frobnicate"}, "there is no command frobnicate; there are train, bench, plan, ");
  expect_refused({"checkpoint", "frob"}, "there is no command checkpoint frob; there are inspect, verify, export, ");
  expect_refused({"checkpoint", "inspct", "run"}, "there is no command checkpoint inspct; did you mean inspect?");
  expect_refused({"trace", "frob"}, "there is no command trace frob; there are merge (");
  expect_refused({"checkpoint", "export", "run", "hf", "--shard-gb", "0"}, "--shard-gb 0: give 1e-9 to 1e9");
  expect_refused({"checkpoint", "export", "run", "model.pt", "--shard-gb", "1"}, "OUTPUT model.pt is one file");
  expect_refused({"checkpoint", "export", "run", "model.pth"}, "model.pth: give FILE.safetensors, FILE.pt");
  expect_refused({"checkpoint", "export", "run", "model.PTH"}, "model.PTH: give FILE.safetensors, FILE.pt");
  expect_refused({"plan", "--params", "7B"}, "--params 7B: give a number, such as 7e9");
  expect_refused({"checkpoint", "verify", "--deep", "somewhere"}, "there is no option --deep");
  expect_refused({"launch", "--stop-grace", "-1", "--", "true"}, "-1 seconds to stop in: give 0 or more");
  expect_refused({"launch", "--grace", "-1", "--", "true"}, "-1 seconds of grace: give 0 or more");
  expect_refused({"train", "--ranks", "3", "--transport", "nccl"},
                 "--transport nccl: not in this version; available: auto, host, tcp, gloo");
  expect_refused(
      {"train", "--strategy", "zero9"},
      "--strategy zero9: not in this version; available: ddp, zero1, zero2, megatron, fsdp, fsdp_grad_op, "
      "hybrid, hybrid_grad_op, fsdp_no_shard, local_sgd, slowmo, diloco, decentralized, hybrid_gossip, none, local");
  expect_refused({"train", "--strategy", "decentralized", "--exchange-dtype", "int4"},
                 "--exchange-dtype int4: not in this version; available: float32");
  expect_refused({"train", "--strategy", "decentralized", "--neighbour-timeout", "0"},
                 "--neighbour-timeout 0: give seconds above 0");
  expect_refused({"train", "--optimizer", "lion"}, "--optimizer lion");
  expect_refused({"train", "--accum-iter", "2"},
                 "--accum-iter 2: is for --optimizer accum_adam and accum_adamw, not adamw");
  expect_refused({"train", "--optimizer", "accum_adam", "--accum-iter", "0"}, "--accum-iter 0: give at least 1");
  expect_refused({"train", "--optimizer", "accum_adam", "--accum-iter", "two"}, "--accum-iter");
  expect_refused({"train", "--dtype", "float8"}, "--dtype float8");
  for (const std::string device : {"gpu", "cuda:0"}) {
    expect_refused({"train", "--device", device}, "--device " + device + ": cpu or cuda");
  }
  expect_refused({"train", "--model", "resnet"}, "choose one of mlp, cnn, gpt");
  expect_refused({"train", "--size", "huge"}, "huge");
  expect_refused({"train", "--data", "cifar"}, "--data cifar");
  expect_refused({"train", "--model", "gpt"}, "--data text:FILE");
  expect_refused({"train", "--steps", "5", "--epochs", "1"}, "give one of them");
  expect_refused({"train", "--batch", "-1"}, "--batch -1");
  expect_refused({"train", "--batch", "0"}, "--batch 0: give at least 1");
  expect_refused({"train", "--lr", "0"}, "--lr 0");
  expect_refused(
      {"train", "--schedule", "sawtooth"},
      "--schedule sawtooth: not in this version; available: constant, linear_warmup, cosine, one_cycle, step");
  expect_refused({"train", "--warmup-steps", "5"},
                 "--warmup-steps 5: is for --schedule linear_warmup, cosine and one_cycle, not constant");
  expect_refused({"train", "--schedule", "cosine", "--warmup-steps", "-1"}, "--warmup-steps -1: give at least 0");
  expect_refused({"train", "--schedule", "cosine", "--warmup-steps", "9", "--steps", "9"},
                 "--warmup-steps 9: give fewer than the 9 steps");
  expect_refused({"train", "--schedule", "linear_warmup"}, "needs --warmup-steps N");
  expect_refused({"train", "--schedule", "one_cycle", "--steps", "3"}, "3 steps cannot rise and fall; give at least 4");
  expect_refused({"train", "--schedule", "one_cycle", "--warmup-steps", "8", "--steps", "9"},
                 "9 steps cannot rise and fall with --warmup-steps 8");
  expect_refused({"train", "--schedule", "step"}, "needs --decay-every N");
  expect_refused({"train", "--schedule", "step", "--decay-every", "0"}, "--decay-every 0: give at least 1");
  expect_refused({"train", "--schedule", "step", "--decay-every", "2", "--decay-factor", "0"},
                 "--decay-factor 0: give a number above 0, up to 1");
  expect_refused({"train", "--schedule", "cosine", "--decay-every", "2"}, "--decay-every 2: is for --schedule step");
  expect_refused({"train", "--dtype", "bf16"}, "--dtype bf16: strategy ddp keeps no float32 copies");
  expect_refused({"train", "--dtype", "bf16", "--strategy", "fsdp", "--replan", "3:zero1"},
                 "take bf16_mixed, a strategy");
  expect_refused({"train", "--dtype", "bf16_pure", "--replan", "3:fsdp"}, "with --replan, all can take bf16_mixed");
  expect_refused({"train", "--dtype", "bf16_pure", "--strategy", "fsdp"}, "--dtype bf16_pure: strategy fsdp keeps");
  expect_refused({"train", "--accumulate", "0"}, "--accumulate 0");
  expect_refused({"train", "--bucket-cap-mb", "-2"}, "bucket_cap_mb is -2");
  expect_refused({"train", "--save-every", "5"}, "needs --save DIR");
  expect_refused({"train", "--strategy", "none", "--ranks", "2"}, "one process");
  expect_refused({"train", "--data", "reference", "--eval"}, "no test set");
  expect_refused({"launch", "-n", "0", "--", "true"}, "0 ranks");
  expect_refused({"train", "--wrong"}, "--wrong");
  expect_refused({"launch", "-n", "2"}, "program");
}

TEST(CommandLine, help_names_defaults_and_version) {
  const auto help = shoal({"train", "--help"});
  EXPECT_EQ(help.code, 0);
  EXPECT_NE(help.output.find("fashion-mnist"), std::string::npos);
  std::istringstream words(help.output);  // lines are broken anywhere
  std::string text;
  for (std::string word; words >> word;) text += word + " ";
  EXPECT_NE(text.find("fsdp_no_shard, hybrid_gossip: true by default with --dtype bf16_mixed and fp16_mixed"),
            std::string::npos)
      << text;
  EXPECT_EQ(shoal({"--version"}).output.substr(0, 6), "shoal ");
}

TEST(CommandLine, ranks_that_contradict_the_environment_are_refused) {
  const auto ended =
      run_together({{{SHOAL, "train", "--ranks", "3"}, {{"RANK", "0"}, {"WORLD_SIZE", "2"}}}}, 20).front();
  EXPECT_EQ(ended.code, 2);
  EXPECT_NE(ended.output.find("--ranks 3 contradicts the world of 2"), std::string::npos) << ended.output;
}

TEST(Input, a_gpu_that_is_not_there_is_named_by_every_rank) {
  const auto ended = run_together({{{SHOAL, "train", "--device", "cuda", "--ranks", "2", "--data", "reference"},
                                    {{"CUDA_VISIBLE_DEVICES", ""}}}},
                                  20)
                         .front();
  EXPECT_NE(ended.code, 0);
  for (const std::string rank : {"rank 0", "rank 1"}) {
    EXPECT_NE(ended.output.find(rank + ": error: --device cuda: this process sees no GPU"), std::string::npos)
        << ended.output;
  }
}

TEST(Input, missing_data_is_named_once_before_ranks_are_started) {
  expect_refused({"train", "--data", "fashion-mnist:/nowhere", "--ranks", "2"}, "there is no folder /nowhere");
  expect_refused({"train", "--model", "gpt", "--data", "text:/nowhere", "--ranks", "2"}, "cannot open /nowhere");
}

TEST(Input, damaged_idx_files_are_named_once_before_ranks_are_started) {
  const TempFolder folder;
  const auto write = [&](const std::string& name, const std::string& content) {
    std::ofstream(folder.file(name), std::ios::binary) << content;
  };
  for (const auto* name : {"train-images-idx3-ubyte", "train-labels-idx1-ubyte"}) {
    write(std::string(name) + ".gz", "this is not gzip");
  }
  const auto data = "fashion-mnist:" + folder.file("");
  auto ended = shoal({"train", "--data", data, "--ranks", "2"});
  EXPECT_EQ(ended.code, 1);
  EXPECT_EQ(ended.output,
            "error: " + folder.file("train-images-idx3-ubyte.gz") + ": not a gzip file although it is named .gz\n");
  for (const auto* name : {"train-images-idx3-ubyte", "train-labels-idx1-ubyte"}) {
    std::filesystem::remove(folder.file(std::string(name) + ".gz"));
    write(name, std::string("\0\0\x08\x03\0\0\0\x0a", 8));
  }
  ended = shoal({"train", "--data", data, "--ranks", "2"});
  EXPECT_EQ(ended.code, 1);
  EXPECT_NE(ended.output.find("train-images-idx3-ubyte"), std::string::npos) << ended.output;
}

TEST(Doctor, reports_as_text_and_as_json) {
  const auto text = shoal({"doctor"});
  EXPECT_EQ(text.code, 0);
  EXPECT_NE(text.output.find("libtorch"), std::string::npos);
  const auto report = nlohmann::json::parse(shoal({"doctor", "--json", "-"}).output);
  EXPECT_EQ(report["transports"]["tcp"], "yes");
  EXPECT_EQ(report["transports"]["gloo"], "yes");
  EXPECT_EQ(report["loopback"], "works");
  EXPECT_GE(report["cores"], 1);
}

}  // namespace
}  // namespace shoal::test::command_line_test
