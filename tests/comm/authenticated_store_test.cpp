// Values that strangers write into the job's store, which are refused.

#include "comm/store/authenticated_store.h"

#include <gtest/gtest.h>

#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "base/printable.h"
#include "comm/store/store.h"
#include "tests/support/refusal.h"

namespace shoal::authenticated_store_test {
namespace {

using namespace std::chrono_literals;

const std::string secret = "0123456789abcdef0123456789abcdef";

struct Stores {
  c10::intrusive_ptr<c10d::HashStore> open = c10::make_intrusive<c10d::HashStore>();
  c10::intrusive_ptr<c10d::Store> own = authenticated(open, JobIdentity("night", secret));
  c10::intrusive_ptr<c10d::Store> peer = authenticated(open, JobIdentity("night", secret));
};

std::string raw(c10d::Store& store, const std::string& key) {
  return store_try_get(store, key).value_or("");
}

TEST(AuthenticatedStore, what_a_process_of_the_job_writes_is_read) {
  const Stores stores;
  for (const std::string value : {"1", "", "a long value \x01\n"}) {
    store_set(*stores.own, "a", value);
    EXPECT_EQ(store_try_get(*stores.peer, "a"), value);
  }
  EXPECT_EQ(store_set_once(*stores.own, "b", "1"), "1");
  EXPECT_EQ(store_set_once(*stores.peer, "b", "2"), "1");
  EXPECT_EQ(store_replace(*stores.peer, "b", "0", "2"), "1");
  EXPECT_EQ(store_replace(*stores.peer, "b", "1", "2"), "2");
  EXPECT_EQ(store_try_get(*stores.own, "b"), "2");
  EXPECT_EQ(store_try_get(*stores.own, "c"), std::nullopt);
  stores.peer->wait({"a", "b"}, 100ms);
  EXPECT_EQ(raw(*stores.open, "b").substr(0, 1), "2") << "values stay readable";
}

TEST(AuthenticatedStore, a_value_that_should_be_a_number_is_refused_by_the_name_of_its_key) {
  EXPECT_EQ(number_in<int>("7 4711 host", "visits/0"), 7);
  EXPECT_EQ(number_in<int64_t>("-3", "visits/0"), -3);
  EXPECT_EQ(number_in<uint64_t>("18446744073709551615", "visits/0"), UINT64_MAX);
  for (const std::string text : {"", "x7", "7x", " 7", "99999999999999999999"}) {
    const auto said = test::refusal<ForgedValue>([&] { number_in<int>(text, "visits/0"); });
    EXPECT_NE(said.find("'visits/0'"), std::string::npos) << text << ": " << said;
  }
}

// Forgeries that a stranger can make from what it reads.
TEST(AuthenticatedStore, a_forged_value_is_refused_by_the_name_of_its_key) {
  const Stores stores;
  const auto another_secret = authenticated(stores.open, JobIdentity("night", secret + "x"));
  const auto another_job = authenticated(stores.open, JobIdentity("day", secret));
  store_set(*stores.own, "other", "value");
  store_set(*stores.own, "key", "value");
  const auto genuine = raw(*stores.open, "key");
  auto changed = genuine;
  changed[0] ^= 1;
  auto changed_mac = genuine;
  changed_mac.back() ^= 1;
  const std::vector<std::pair<std::string, std::function<void()>>> forgeries{
      {"without a proof", [&] { store_set(*stores.open, "key", "value"); }},
      {"empty", [&] { store_set(*stores.open, "key", ""); }},
      {"changed", [&] { store_set(*stores.open, "key", changed); }},
      {"its proof changed", [&] { store_set(*stores.open, "key", changed_mac); }},
      {"a byte moved into the key", [&] { store_set(*stores.open, "key", genuine.substr(1)); }},
      {"of another key", [&] { store_set(*stores.open, "key", raw(*stores.open, "other")); }},
      {"of another secret", [&] { store_set(*another_secret, "key", "value"); }},
      {"of another job", [&] { store_set(*another_job, "key", "value"); }}};
  for (const auto& [what, forge] : forgeries) {
    SCOPED_TRACE(what);
    store_set(*stores.own, "key", "value");
    forge();
    const auto said = test::refusal<ForgedValue>([&] { stores.own->get("key"); });
    EXPECT_NE(said.find("the value of 'key' in the job's store was not written by a process of this job"),
              std::string::npos)
        << said;
    EXPECT_EQ(store_try_get(*stores.peer, "key"), std::nullopt);
    // c10d treats an empty value as absent, and sets the key.
    if (what != "empty") {
      EXPECT_THROW(store_replace(*stores.peer, "key", "", "2"), ForgedValue);
    }
  }
}

TEST(AuthenticatedStore, who_waits_for_a_key_gets_the_jobs_value_whatever_was_there_before) {
  const Stores stores;
  store_set(*stores.open, "key", "planted");
  const auto waiting = c10::make_intrusive<DeadlineStore>(stores.peer, "host:1", 2000ms);
  std::thread owner([&] {
    std::this_thread::sleep_for(300ms);
    store_set(*stores.own, "key", "value");
  });
  const auto value = waiting->get("key");
  owner.join();
  EXPECT_EQ(std::string(value.begin(), value.end()), "value");
  store_set(*stores.open, "never", "planted");
  const auto said = test::refusal<ForgedValue>([&] { waiting->wait({"never"}, 20s); });
  EXPECT_NE(said.find("'never'"), std::string::npos) << said;
}

TEST(AuthenticatedStore, a_report_replaces_a_forged_one) {
  const Stores stores;
  store_set(*stores.open, "failure", "rank 1 \x1b[2J is gone");
  EXPECT_EQ(store_set_once(*stores.own, "failure", "rank 0 is gone"), "rank 0 is gone");
  EXPECT_EQ(store_try_get(*stores.peer, "failure"), "rank 0 is gone");
}

TEST(AuthenticatedStore, without_a_secret_values_are_as_they_were) {
  const auto open = c10::make_intrusive<c10d::HashStore>();
  EXPECT_EQ(authenticated(open, JobIdentity("night", "")).get(), open.get());
}

TEST(JobIdentity, a_secret_that_could_be_guessed_is_refused) {
  const auto said = test::refusal([] { JobIdentity("night", "password"); });
  EXPECT_NE(said.find("openssl rand -hex 32"), std::string::npos) << said;
  EXPECT_EQ(random_secret().size(), 64);
  EXPECT_NE(random_secret(), random_secret());
}

TEST(JobIdentity, parts_cannot_be_moved_into_each_other) {
  const JobIdentity job("night", secret);
  EXPECT_TRUE(same(job.mac("store", {"ab", "c"}), job.mac("store", {"ab", "c"})));
  for (const auto& other : {job.mac("store", {"a", "bc"}), job.mac("store", {"abc"}), job.mac("storeab", {"c"}),
                            job.mac("gossip", {"ab", "c"}), JobIdentity("nights", secret).mac("tore", {"ab", "c"})}) {
    EXPECT_FALSE(same(job.mac("store", {"ab", "c"}), other));
  }
}

TEST(Printable, control_characters_are_shown_as_numbers) {
  EXPECT_EQ(printable("rank 1: \x1b[2J\r\n\tgone\x7f"), "rank 1: \\x1b[2J\\x0d\\x0a\\x09gone\\x7f");
  EXPECT_EQ(printable("gr\xc3\xbc\xc3\x9f \xe2\x82\xac"), "gr\xc3\xbc\xc3\x9f \xe2\x82\xac");
  EXPECT_EQ(printable("\xed\xb3\xbf\xe0\x80\x80"), "\\xed\\xb3\\xbf\\xe0\\x80\\x80") << "a surrogate, an overlong form";
  EXPECT_EQ(printable("\xc2\x9b"
                      "2J \xff \xe2\x82"),
            "\\xc2\\x9b2J \\xff \\xe2\\x82")
      << "C1, no UTF-8, cut off";
}

}  // namespace
}  // namespace shoal::authenticated_store_test
