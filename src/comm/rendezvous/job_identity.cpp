#include "comm/rendezvous/job_identity.h"

#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <stdexcept>

#include "shoal/error.h"

namespace shoal {
namespace {

constexpr size_t least_secret = 16;  // characters

void append_with_length(std::string& message, std::string_view part) {
  for (int shift = 0; shift < 64; shift += 8) message += static_cast<char>(part.size() >> shift);
  message += part;
}

// Call before any other OpenSSL function. OpenSSL's own cleanup at exit would free memory that threads of the store and
// of gossip still use, since nobody waits for those at exit.
void prepare_openssl() {
  static const bool ready = OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr) == 1;
  if (!ready) throw std::runtime_error("OpenSSL cannot be used");
}

}  // namespace

JobIdentity::JobIdentity(std::string name, std::string secret) : name_(std::move(name)), secret_(std::move(secret)) {
  prepare_openssl();
  if (has_secret() && secret_.size() < least_secret) {
    throw UsageError(
        fmt::format("SHOAL_SECRET has {} characters and could be guessed: give at least {} random ones, for example of "
                    "openssl rand -hex 32",
                    secret_.size(), least_secret));
  }
}

Mac JobIdentity::mac(std::string_view purpose, std::initializer_list<std::string_view> parts) const {
  std::string message;
  append_with_length(message, name_);
  append_with_length(message, purpose);
  for (const auto& part : parts) append_with_length(message, part);
  Mac result;
  unsigned int size = 0;
  const auto* made = HMAC(EVP_sha256(), secret_.data(), static_cast<int>(secret_.size()),
                          reinterpret_cast<const unsigned char*>(message.data()), message.size(), result.data(), &size);
  if (made == nullptr || size != result.size()) throw std::runtime_error("OpenSSL cannot make an HMAC-SHA256");
  return result;
}

bool same(const Mac& a, const Mac& b) {
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

Mac random_challenge() {
  prepare_openssl();
  Mac bytes;
  if (RAND_bytes(bytes.data(), static_cast<int>(bytes.size())) != 1) {
    throw std::runtime_error("OpenSSL has no random numbers");
  }
  return bytes;
}

std::string random_secret() {
  std::string text;
  for (const auto byte : random_challenge()) text += fmt::format("{:02x}", byte);
  return text;
}

}  // namespace shoal
