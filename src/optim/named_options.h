#pragma once
// Options of an optimizer by name, for checkpoints and for comparisons over ranks.

#include <torch/optim/optimizer.h>

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace shoal {

// Options that stand for those of another type, such as an optimizer's of another language.
class OptionsOfType {
 public:
  virtual ~OptionsOfType() = default;
  virtual std::string type() const = 0;
};

// A number as JSON, which has no infinity and no NaN: those become objects. number_from: nothing for what is none.
nlohmann::json json_number(double number);
std::optional<double> number_from(const nlohmann::json& value);

// The same of numbers by name. numbers_from: nlohmann::json::exception for what is none.
nlohmann::json json_numbers(const std::map<std::string, double>& numbers);
std::map<std::string, double> numbers_from(const nlohmann::json& values);

// "torch::optim::AdamWOptions"; OptionsOfType say what they stand for.
std::string type_of(const torch::optim::OptimizerOptions& options);

// The options under the names with which they serialize themselves: numbers, booleans, strings, null, and lists of
// these. For options that do not serialize themselves, the learning rate, if there is one.
nlohmann::json named_options(const torch::optim::OptimizerOptions& options);

// Sets the options in `named`; others stay. UsageError for unknown names and for values of another kind, before
// anything has changed.
void set_options(torch::optim::OptimizerOptions& options, const nlohmann::json& named);

// A value among them without the last digits, in which functions of the hosts' libraries may differ, and numbers as
// floats: an integer of Python is equal to the float that a rank gets which joins.
std::string rounded_text(const nlohmann::json& value);

// "betas [0.9,0.999], eps 1e-08, lr 0.001".
std::string describe(const torch::optim::OptimizerOptions& options);

}  // namespace shoal
