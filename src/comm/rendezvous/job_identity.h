#pragma once
// Name and secret of a job.

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

namespace shoal {

using Mac = std::array<uint8_t, 32>;

class JobIdentity {
 public:
  JobIdentity() = default;
  // An empty secret turns authentication off. UsageError for a secret that could be guessed.
  JobIdentity(std::string name, std::string secret);

  const std::string& name() const { return name_; }
  bool has_secret() const { return !secret_.empty(); }
  // HMAC-SHA256 over the job's name, the purpose and the parts, each with its length: proves that its maker knows the
  // secret and means exactly this.
  Mac mac(std::string_view purpose, std::initializer_list<std::string_view> parts) const;

 private:
  std::string name_;
  std::string secret_;
};

// Compares in constant time.
bool same(const Mac& a, const Mac& b);

// Unpredictable values from the system's random source.
Mac random_challenge();
std::string random_secret();

}  // namespace shoal
