#pragma once
// Parameters of the Python definition with seed 1: index, name, shape and first three values. All of the tiny models,
// some of the small ones.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace shoal::models {

struct ParameterVector {
  size_t place;
  std::string name;
  std::vector<int64_t> shape;
  std::array<float, 3> first;
};

struct ModelVector {
  std::string model;
  std::string size;
  int64_t numel;
  size_t parameters;
  std::vector<ParameterVector> vectors;
};

inline const std::vector<ModelVector>& model_vectors() {
  static const std::vector<ModelVector> all{
      {"mlp",
       "tiny",
       118282,
       6,
       {
           {0, "fc1.weight", {128, 784}, {0.020479297f, 0.02850396f, -0.013617111f}},
           {1, "fc1.bias", {128}, {-0.018240083f, 0.027390549f, 0.005366875f}},
           {2, "fc2.weight", {128, 128}, {-0.07401951f, -0.014355533f, 0.027451811f}},
           {3, "fc2.bias", {128}, {0.009566765f, 0.07051519f, 0.016403195f}},
           {4, "fc3.weight", {10, 128}, {-0.016580833f, 0.02380611f, 0.06474015f}},
           {5, "fc3.bias", {10}, {0.08229048f, 0.028842637f, 4.17780611e-05f}},
       }},
      {"mlp",
       "small",
       1863690,
       6,
       {
           {0, "fc1.weight", {1024, 784}, {0.020479297f, 0.02850396f, -0.013617111f}},
           {5, "fc3.bias", {10}, {0.029094078f, 0.010197412f, 1.4770776e-05f}},
       }},
      {"cnn",
       "tiny",
       9122,
       8,
       {
           {0, "stage1.conv.weight", {8, 1, 3, 3}, {0.1911401f, 0.26603696f, -0.12709305f}},
           {1, "stage1.bn.weight", {8}, {1.0f, 1.0f, 1.0f}},
           {2, "stage1.bn.bias", {8}, {0.0f, 0.0f, 0.0f}},
           {3, "stage2.conv.weight", {16, 8, 3, 3}, {0.012755687f, 0.09402026f, 0.021870928f}},
           {4, "stage2.bn.weight", {16}, {1.0f, 1.0f, 1.0f}},
           {5, "stage2.bn.bias", {16}, {0.0f, 0.0f, 0.0f}},
           {6, "fc.weight", {10, 784}, {-0.00074224814f, -0.00639821f, -0.004776125f}},
           {7, "fc.bias", {10}, {-0.03518217f, 0.030216882f, -0.011776861f}},
       }},
      {"cnn",
       "small",
       137418,
       8,
       {
           {3, "stage2.conv.weight", {128, 64, 3, 3}, {0.004509817f, 0.033241183f, 0.0077325404f}},
           {6, "fc.weight", {10, 6272}, {-0.00026242435f, -0.0022621087f, -0.001688615f}},
       }},
      {"gpt",
       "tiny",
       118144,
       26,
       {
           {0, "wte.weight", {256, 64}, {0.071677536f, 0.099763855f, -0.04765989f}},
           {1, "wpe.weight", {32, 64}, {-0.063840285f, 0.09586692f, 0.018784061f}},
           {2, "blocks.0.ln1.weight", {64}, {1.0f, 1.0f, 1.0f}},
           {3, "blocks.0.ln1.bias", {64}, {0.0f, 0.0f, 0.0f}},
           {4, "blocks.0.qkv.weight", {192, 64}, {-0.02344884f, 0.033666924f, 0.0915564f}},
           {5, "blocks.0.proj.weight", {64, 64}, {0.11637631f, 0.04078965f, 5.90831041e-05f}},
           {6, "blocks.0.proj.bias", {64}, {-0.0025978684f, -0.022393733f, -0.016716436f}},
           {7, "blocks.0.ln2.weight", {64}, {1.0f, 1.0f, 1.0f}},
           {8, "blocks.0.ln2.bias", {64}, {0.0f, 0.0f, 0.0f}},
           {9, "blocks.0.fc.weight", {256, 64}, {0.1171107f, -0.092440024f, 0.063457936f}},
           {10, "blocks.0.fc.bias", {256}, {0.04042174f, 0.045555726f, 0.06780392f}},
           {11, "blocks.0.out.weight", {64, 256}, {0.011002645f, 0.014858849f, 0.01982022f}},
           {12, "blocks.0.out.bias", {64}, {-0.031384073f, 0.013497941f, -0.021659538f}},
           {13, "blocks.1.ln1.weight", {64}, {1.0f, 1.0f, 1.0f}},
           {14, "blocks.1.ln1.bias", {64}, {0.0f, 0.0f, 0.0f}},
           {15, "blocks.1.qkv.weight", {192, 64}, {0.03623137f, -0.012143865f, 0.070460945f}},
           {16, "blocks.1.proj.weight", {64, 64}, {0.11827405f, 0.069803774f, -0.08645694f}},
           {17, "blocks.1.proj.bias", {64}, {-0.04706855f, 0.0531929f, 0.053590924f}},
           {18, "blocks.1.ln2.weight", {64}, {1.0f, 1.0f, 1.0f}},
           {19, "blocks.1.ln2.bias", {64}, {0.0f, 0.0f, 0.0f}},
           {20, "blocks.1.fc.weight", {256, 64}, {0.06783211f, 0.123975396f, 0.07269226f}},
           {21, "blocks.1.fc.bias", {256}, {0.08332276f, -0.0010108948f, -0.070576f}},
           {22, "blocks.1.out.weight", {64, 256}, {-0.027550615f, 0.0018068254f, 0.004990466f}},
           {23, "blocks.1.out.bias", {64}, {0.05265873f, -0.0090547055f, 0.02867949f}},
           {24, "ln_f.weight", {64}, {1.0f, 1.0f, 1.0f}},
           {25, "ln_f.bias", {64}, {0.0f, 0.0f, 0.0f}},
       }},
      {"gpt",
       "small",
       25404416,
       92,
       {
           {1, "wpe.weight", {128, 512}, {-0.022570949f, 0.033894073f, 0.006641168f}},
           {89, "blocks.7.out.bias", {512}, {0.0090815555f, 0.008120291f, -0.012464095f}},
       }},
  };
  return all;
}

}  // namespace shoal::models
