#pragma once
// Character source for the JSON parser.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <string>
#include <string_view>

#include "base/refuse.h"

namespace shoal {

// The parser stores a whole token several times before it reports it, and counts white space to the token. So this
// class refuses long tokens while they are read, and passes one character for each run of white space.
class JsonScanner {
 public:
  // next: returns the next piece of the text, valid until the following call; empty at the end.
  using Next = std::function<std::string_view()>;
  JsonScanner(Next next, int64_t text_bytes, const std::string& subject, Refuse refuse);

  bool ended() const { return ended_; }
  char current() const { return current_; }
  void advance();
  int64_t offset() const { return offset_; }  // bytes read

  // Iterator for the parser.
  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = char;
    using difference_type = std::ptrdiff_t;
    using pointer = const char*;
    using reference = char;

    explicit Iterator(JsonScanner* scanner = nullptr) : scanner_(scanner) {}
    char operator*() const { return scanner_->current(); }
    Iterator& operator++() {
      scanner_->advance();
      return *this;
    }
    void operator++(int) { scanner_->advance(); }
    bool operator==(const Iterator& other) const { return at_end() == other.at_end(); }
    bool operator!=(const Iterator& other) const { return !(*this == other); }

   private:
    bool at_end() const { return scanner_ == nullptr || scanner_->ended(); }

    JsonScanner* scanner_;
  };

 private:
  bool take();
  void watch_token();

  Next next_;
  int64_t text_bytes_;
  const std::string& subject_;
  Refuse refuse_;
  std::string_view piece_;
  size_t place_ = 0;
  int64_t offset_ = 0;
  int64_t token_bytes_ = 0;
  char current_ = 0;
  bool ended_ = false;
  bool quoted_ = false;
  bool escaped_ = false;
};

}  // namespace shoal
