#include "base/strict_json.h"

#include <fmt/format.h>

#include <utility>
#include <vector>

#include "base/json_scanner.h"

namespace shoal {
namespace {

using Json = nlohmann::json;

// Builder of the value. The library's own callback interface looks through all entries of an object whenever one of
// them ends, and does not detect repeated keys.
class Builder : public nlohmann::json_sax<Json> {
 public:
  Builder(const JsonLimits& limits, const JsonStream& stream, const std::string& subject, Refuse refuse,
          const JsonScanner& scanner)
      : limits_(limits), stream_(stream), subject_(subject), refuse_(refuse), scanner_(scanner) {}

  Json take() { return std::move(root_); }

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t&) override { return add(value); }
  bool binary(binary_t&) override { return false; }  // not in JSON text
  bool string(string_t& value) override {
    spend(text_bytes + static_cast<int64_t>(value.size()));
    return add(value);
  }

  bool start_object(std::size_t) override { return open(Json::object(), object_bytes); }
  bool start_array(std::size_t) override { return open(Json::array(), list_bytes); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    spend(member_bytes + static_cast<int64_t>(name.size()));
    const auto [member, fresh] = open_.back()->get_ref<Json::object_t&>().try_emplace(name);
    if (!fresh) refuse_(fmt::format("{}: two entries named {:.200}", subject_, name));
    member_ = &member->second;
    streams_ = open_.size() == 1 && !stream_.name.empty() && name == stream_.name;
    return true;
  }

  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception& error) override {
    // The message is "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error ...", with a
    // position that is not the file's.
    const std::string_view whole = error.what();
    auto reason = whole.substr(std::min(whole.size(), whole.find("] ") + 2));
    if (reason.starts_with("parse error at")) reason = reason.substr(std::min(reason.size(), reason.find(": ") + 2));
    refuse_(fmt::format("{}: not JSON: near byte {}: {:.200}", subject_, scanner_.offset(), reason));
    return false;
  }

 private:
  // Memory in libstdc++, including the allocator's share. A growing list briefly exists twice, and the library copies a
  // list to destroy it.
  static constexpr int64_t element_bytes = 80;
  static constexpr int64_t member_bytes = 112;
  static constexpr int64_t object_bytes = 64;
  static constexpr int64_t list_bytes = 48;
  static constexpr int64_t text_bytes = 48;

  void spend(int64_t bytes) {
    spent_ += bytes;
    if (spent_ <= limits_.bytes) return;
    refuse_(fmt::format("{}: its JSON takes more than {} bytes of memory, the most that is expected", subject_,
                        limits_.bytes));
  }

  Json& place(Json value) {
    if (open_.empty()) return root_ = std::move(value);
    if (!open_.back()->is_array()) return *member_ = std::move(value);
    spend(element_bytes);
    auto& list = open_.back()->get_ref<Json::array_t&>();
    return list.emplace_back(std::move(value));
  }

  template <class Value>
  bool add(Value&& value) {
    place(Json(std::forward<Value>(value)));
    hand_out();
    return true;
  }

  bool open(Json container, int64_t bytes) {
    if (static_cast<int>(open_.size()) >= limits_.depth) {
      refuse_(fmt::format("{}: JSON nested deeper than {}", subject_, limits_.depth));
    }
    spend(bytes);
    const bool streamed = streams_ && open_.size() == 1 && container.is_array();
    open_.push_back(&place(std::move(container)));
    if (streamed) {
      streamed_ = open_.back();
      spent_before_ = spent_;
    }
    return true;
  }

  bool close() {
    if (open_.back() == streamed_) streamed_ = nullptr;
    open_.pop_back();
    hand_out();
    return true;
  }

  void hand_out() {
    if (open_.empty() || open_.back() != streamed_) return;
    auto& list = streamed_->get_ref<Json::array_t&>();
    stream_.each(std::move(list.back()));
    list.clear();
    spent_ = spent_before_;
  }

  const JsonLimits& limits_;
  const JsonStream& stream_;
  const std::string& subject_;
  Refuse refuse_;
  const JsonScanner& scanner_;
  Json root_;
  std::vector<Json*> open_;  // unfinished objects and lists
  Json* member_ = nullptr;   // value of the last key
  bool streams_ = false;     // the last key is the stream's
  Json* streamed_ = nullptr;
  int64_t spent_ = 0;
  int64_t spent_before_ = 0;  // before the stream began
};

Json parse(JsonScanner::Next next, const JsonLimits& limits, const std::string& subject, Refuse refuse,
           const JsonStream& stream) {
  JsonScanner scanner(std::move(next), limits.text_bytes, subject, refuse);
  Builder builder(limits, stream, subject, refuse, scanner);
  Json::sax_parse(JsonScanner::Iterator(&scanner), JsonScanner::Iterator(), &builder);
  return builder.take();
}

}  // namespace

Json parse_strict(std::string_view text, const JsonLimits& limits, const std::string& subject, Refuse refuse) {
  const auto next = [text]() mutable { return std::exchange(text, {}); };
  return parse(next, limits, subject, refuse, {});
}

Json parse_strict(const InputFile& file, const JsonLimits& limits, const std::string& subject, Refuse refuse,
                  const JsonStream& stream) {
  std::vector<char> piece(size_t{1} << 16);
  int64_t offset = 0;
  const auto next = [&]() -> std::string_view {
    const auto count = file.read_some(piece.data(), static_cast<int64_t>(piece.size()), offset);
    offset += count;
    return {piece.data(), static_cast<size_t>(count)};
  };
  return parse(next, limits, subject, refuse, stream);
}

}  // namespace shoal
