// A recorder without a device: a recording is the work itself, done again at every replay.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "generation/recorded_steps.h"

namespace nemo_rl::generation {

struct RecorderLog {
  std::vector<std::string> events;  ///< "record 8", "replay 8", "drop"
  std::int64_t count(const std::string& event) const { return std::count(events.begin(), events.end(), event); }
};

class FakeRecordedWork : public runtime::RecordedWork {
 public:
  explicit FakeRecordedWork(RecorderLog& log) : log_(log) {}
  ~FakeRecordedWork() override { log_.events.push_back("drop"); }
  void record(std::int64_t key, const std::function<void()>& work) override {
    log_.events.push_back("record " + std::to_string(key));
    work_[key] = work;
  }
  bool replay(std::int64_t key) override {
    const auto found = work_.find(key);
    if (found == work_.end()) return false;
    log_.events.push_back("replay " + std::to_string(key));
    found->second();
    return true;
  }

 private:
  RecorderLog& log_;
  std::map<std::int64_t, std::function<void()>> work_;
};

inline RecordedSteps::Recorder fake_recorder(RecorderLog& log) {
  return [&log] { return std::make_unique<FakeRecordedWork>(log); };
}

}  // namespace nemo_rl::generation
