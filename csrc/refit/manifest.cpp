#include "refit/manifest.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "common/check.h"
#include "runtime/tensor.h"

namespace nemo_rl::refit {
namespace {

constexpr at::ScalarType kTypes[] = {at::kFloat, at::kBFloat16, at::kDouble, at::kHalf};
constexpr std::int64_t kMostDimensions = 8;

/// Numbers and names, one behind the other.
class Writer {
 public:
  void number(std::uint64_t value) {
    const auto* bytes = reinterpret_cast<const char*>(&value);
    bytes_.insert(bytes_.end(), bytes, bytes + sizeof value);
  }
  void text(const std::string& value) {
    number(value.size());
    bytes_.insert(bytes_.end(), value.begin(), value.end());
  }
  at::Tensor bytes() const {
    auto out = at::empty({static_cast<std::int64_t>(bytes_.size())}, at::kByte);
    std::memcpy(out.data_ptr(), bytes_.data(), bytes_.size());
    return out;
  }

 private:
  std::vector<char> bytes_;
};

class Reader {
 public:
  explicit Reader(const at::Tensor& bytes)
      : at_(static_cast<const char*>(bytes.const_data_ptr())), left_(static_cast<std::size_t>(bytes.numel())) {}
  std::uint64_t number() {
    std::uint64_t value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  std::string text() {
    const auto size = number();
    const char* begin = take(size);
    return {begin, static_cast<std::size_t>(size)};
  }
  bool at_end() const { return left_ == 0; }

 private:
  const char* take(std::uint64_t size) {
    if (size > left_) throw RefitRefused("the manifest of a refit is cut off");
    const char* begin = at_;
    at_ += size, left_ -= static_cast<std::size_t>(size);
    return begin;
  }
  const char* at_;
  std::size_t left_;
};

std::string list_of(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size() && i < 3; ++i) text += (i ? ", " : "") + names[i];
  return names.size() > 3 ? detail::concat(text, " and ", names.size() - 3, " more") : text;
}

}  // namespace

std::int64_t TensorSpec::bytes() const {
  std::int64_t n = static_cast<std::int64_t>(c10::elementSize(dtype));
  for (auto size : shape) n *= size;
  return n;
}

std::string TensorSpec::text() const { return detail::concat(at::IntArrayRef(shape), " ", c10::toString(dtype)); }

std::vector<TensorSpec> specs_of(const NamedTensors& tensors) {
  std::vector<TensorSpec> specs;
  for (const auto& [name, tensor] : tensors) {
    NRL_CHECK_ARG(tensor.is_cpu() && tensor.is_contiguous(), "refit: ", name,
                  " must be contiguous and on the CPU, it is on ", tensor.device().str());
    NRL_CHECK_ARG(std::ranges::find(kTypes, tensor.scalar_type()) != std::end(kTypes), "refit: ", name, " is ",
                  c10::toString(tensor.scalar_type()), ", which is no type of weights");
    NRL_CHECK_ARG(tensor.dim() <= kMostDimensions, "refit: ", name, " has ", tensor.dim(), " dimensions");
    specs.push_back({name, tensor.sizes().vec(), tensor.scalar_type()});
  }
  return specs;
}

at::Tensor Manifest::packed() const {
  Writer out;
  out.number(version), out.number(base.has_value()), out.number(base.value_or(0));
  out.number(static_cast<std::uint64_t>(bucket_bytes)), out.number(tensors.size());
  for (const auto& spec : tensors) {
    out.text(spec.name);
    out.number(static_cast<std::uint64_t>(spec.dtype)), out.number(spec.shape.size());
    for (auto size : spec.shape) out.number(static_cast<std::uint64_t>(size));
  }
  return out.bytes();
}

Manifest Manifest::unpacked(const at::Tensor& bytes) {
  Reader in(bytes);
  Manifest manifest;
  manifest.version = in.number();
  const bool has_base = in.number() != 0;
  if (const auto base = in.number(); has_base) manifest.base = base;
  manifest.bucket_bytes = static_cast<std::int64_t>(in.number());
  if (manifest.bucket_bytes < 1) throw RefitRefused("the manifest of a refit has buckets without room");
  const auto count = in.number();
  for (std::uint64_t i = 0; i < count; ++i) {
    TensorSpec spec;
    spec.name = in.text();
    const auto type = static_cast<at::ScalarType>(in.number());
    const auto dimensions = in.number();
    if (std::ranges::find(kTypes, type) == std::end(kTypes) || dimensions > kMostDimensions)
      throw RefitRefused("the manifest of a refit describes no tensor under " + spec.name);
    spec.dtype = type;
    for (std::uint64_t d = 0; d < dimensions; ++d) spec.shape.push_back(static_cast<std::int64_t>(in.number()));
    manifest.tensors.push_back(std::move(spec));
  }
  if (!in.at_end()) throw RefitRefused("the manifest of a refit goes on behind its end");
  return manifest;
}

std::string difference(const Manifest& theirs, const Expected& expected) {
  if (theirs.version != expected.version)
    return detail::concat("it is version ", theirs.version, ", version ", expected.version, " was expected");
  if (theirs.base.has_value() && theirs.base != expected.in_use)
    return detail::concat("it is what has changed since version ", *theirs.base, ", and the weights in use are of ",
                          expected.in_use ? detail::concat("version ", *expected.in_use) : std::string("no refit"));
  std::unordered_map<std::string, const TensorSpec*> missing;
  for (const auto& spec : expected.tensors) missing.emplace(spec.name, &spec);
  std::vector<std::string> unknown, twice, other;
  std::unordered_map<std::string, bool> seen;
  for (const auto& spec : theirs.tensors) {
    if (!seen.emplace(spec.name, true).second) {
      twice.push_back(spec.name);
      continue;
    }
    const auto found = missing.find(spec.name);
    if (found == missing.end()) {
      unknown.push_back(spec.name);
      continue;
    }
    if (spec.shape != found->second->shape || spec.dtype != found->second->dtype)
      other.push_back(detail::concat(spec.name, " is ", spec.text(), ", ", found->second->text(), " was expected"));
    missing.erase(found);
  }
  std::vector<std::string> left;
  for (const auto& spec : expected.tensors)
    if (missing.contains(spec.name)) left.push_back(spec.name);
  std::string text;
  const auto add = [&](const std::vector<std::string>& names, const std::string& before) {
    if (!names.empty()) text += (text.empty() ? "" : "; ") + before + list_of(names);
  };
  add(left, "missing: "), add(unknown, "unknown: "), add(twice, "twice: "), add(other, "");
  return text;
}

std::vector<Bucket> buckets_of(const Manifest& manifest) {
  std::vector<Bucket> buckets;
  for (std::size_t t = 0; t < manifest.tensors.size(); ++t) {
    const std::int64_t total = manifest.tensors[t].bytes();
    for (std::int64_t begin = 0; begin < total;) {
      if (buckets.empty() || buckets.back().bytes == manifest.bucket_bytes) buckets.emplace_back();
      auto& bucket = buckets.back();
      const std::int64_t size = std::min(total - begin, manifest.bucket_bytes - bucket.bytes);
      bucket.pieces.push_back({t, begin, bucket.bytes, size});
      bucket.bytes += size, begin += size;
    }
  }
  return buckets;
}

}  // namespace nemo_rl::refit
