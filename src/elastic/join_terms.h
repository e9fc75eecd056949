#pragma once
// Terms that a process must meet to join an elastic job.

#include <functional>
#include <string>
#include <vector>

#include "comm/membership/join_table.h"
#include "elastic/elastic_parts.h"
#include "shoal/data.h"
#include "shoal/elastic.h"

namespace shoal {

// A newcomer compares itself with the job before it asks to join, so that one that does not fit ends alone, and once
// more with what it gets. Numbers among the optimizer's options are not compared: schedules change them, and it gets
// the job's.
class JoinTerms {
 public:
  // The arguments must outlive this object. sampler, training: nullptr: there is none. transport: of WorldOptions.
  JoinTerms(const ElasticParts& parts, const DistributedSampler* sampler, const ElasticOptions& options,
            ElasticTraining* training, const std::string& transport);

  // Says in the job's table what newcomers must have in common with this member, or why none can join.
  void publish(JoinTable& table) const;
  // In a newcomer: waits for what members have said, and compares it with this process. Calls while_waiting about every
  // 10 ms. UsageError that lists what differs, or says why nobody can join.
  void require_alike(JoinTable& table, int timeout_seconds, const std::function<void()>& while_waiting) const;
  // The same with the text() of a member.
  void require_alike(const std::string& job) const;
  // In a member: how it differs by now from what publish() has said, so that newcomers, which fit that, do not fit any
  // more; empty: not at all.
  std::string changed_since(const JoinTable& table) const;

  // Line by line what must be equal; a line begins with what it is about.
  std::string text() const;
  // The loss scaler beside the optimizer; nullptr: none.
  GradScaler* scaler() const;

 private:
  std::string why_closed() const;
  std::vector<std::string> lines() const;
  std::string differences_from(const std::string& other, const char* whose) const;

  const ElasticParts& parts_;
  const DistributedSampler* sampler_;
  const ElasticOptions& options_;
  ElasticTraining* training_;
  std::string transport_;
};

}  // namespace shoal
