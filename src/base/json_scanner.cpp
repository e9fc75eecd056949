#include "base/json_scanner.h"

#include <fmt/format.h>

#include <utility>

namespace shoal {
namespace {

constexpr int64_t most_word_bytes = 1000;  // limit for a number, true, false or null

bool is_space(char c) {
  return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

bool is_structure(char c) {
  return c == '{' || c == '}' || c == '[' || c == ']' || c == ',' || c == ':';
}

}  // namespace

JsonScanner::JsonScanner(Next next, int64_t text_bytes, const std::string& subject, Refuse refuse)
    : next_(std::move(next)), text_bytes_(text_bytes), subject_(subject), refuse_(refuse) {
  advance();
}

bool JsonScanner::take() {
  if (place_ == piece_.size()) {
    piece_ = next_();
    place_ = 0;
    if (piece_.empty()) return false;
  }
  current_ = piece_[place_++];
  ++offset_;
  return true;
}

void JsonScanner::advance() {
  const bool after_space = offset_ > 0 && !quoted_ && is_space(current_);
  do {
    if (!take()) {
      ended_ = true;
      return;
    }
  } while (after_space && is_space(current_));
  watch_token();
}

void JsonScanner::watch_token() {
  if (quoted_) {
    if (escaped_) {
      escaped_ = false;
    } else if (current_ == '\\') {
      escaped_ = true;
    } else if (current_ == '"') {
      quoted_ = false;
      token_bytes_ = 0;
      return;
    }
    if (++token_bytes_ <= text_bytes_) return;
    refuse_(fmt::format("{}: a name or text of more than {} bytes", subject_, text_bytes_));
  }
  if (current_ == '"' || is_space(current_) || is_structure(current_)) {
    quoted_ = current_ == '"';
    token_bytes_ = 0;
    return;
  }
  if (++token_bytes_ > most_word_bytes) {
    refuse_(fmt::format("{}: not JSON: a number or word of more than {} bytes", subject_, most_word_bytes));
  }
}

}  // namespace shoal
