// `_text`: a model that writes text, for programs that need no trainer. It stands on LibTorch alone: torch's Python
// side takes longer to load than a small model takes to answer.
#include <ATen/Parallel.h>
#include <pybind11/functional.h>

#include <algorithm>
#include <map>

#include "bindings/interruptible.h"
#include "bindings/model_config.h"
#include "common/check.h"
#include "generation/engine.h"
#include "generation/native_model_runner.h"
#include "ops/weight_blocks.h"
#include "runtime/tensor.h"

namespace nemo_rl::bindings {
namespace {

namespace py = pybind11;
using namespace nemo_rl::generation;

at::ScalarType dtype_of(const std::string& name) {
  static const std::map<std::string, at::ScalarType> types = {{"F64", at::kDouble},    {"F32", at::kFloat},
                                                              {"F16", at::kHalf},      {"BF16", at::kBFloat16},
                                                              {"float32", at::kFloat}, {"bfloat16", at::kBFloat16}};
  const auto found = types.find(name);
  NRL_CHECK_ARG(found != types.end(), "weights of dtype ", name, " are not read: expected F64, F32, F16 or BF16");
  return found->second;
}

constexpr std::int64_t kAnyCache = std::int64_t{1} << 60;  // the engine takes what one text needs

/// One model, one text at a time.
class TextModel {
 public:
  TextModel(const py::dict& config, const std::string& dtype, std::int64_t max_model_len, const std::string& device)
      : model_(std::make_shared<model::DecoderModel>(config_from(config), dtype_of(dtype), false, at::Device(device))),
        engine_(std::make_shared<NativeModelRunner>(model_), EngineConfig{{1, 512}, max_model_len, kAnyCache, false},
                nullptr) {}

  py::list shapes() const {
    py::list out;
    for (const auto& s : model_->layout().specs) out.append(py::make_tuple(s.name, s.shape));
    for (const auto& s : model_->layout().blocks) out.append(py::make_tuple(s.name, s.shape));
    return out;
  }

  /// Adds adapters, apart from the weights; put() fills them, then masters_changed().
  void adapt(std::int64_t dim, double alpha, std::vector<std::string> targets, bool use_rslora) {
    model_->adapt({dim, alpha, std::move(targets), /*merge=*/false, use_rslora});
  }
  void masters_changed() { model_->masters_changed(); }

  /// Converts rows of a parameter from row `first` on, or A or B of an adapter, from the bytes of a file.
  void put(const std::string& name, const std::string& dtype, const py::buffer& data, std::int64_t first) {
    const py::buffer_info bytes = data.request();
    const auto type = dtype_of(dtype);
    const auto size = bytes.size * bytes.itemsize, width = static_cast<std::int64_t>(c10::elementSize(type));
    NRL_CHECK_ARG(size % width == 0, name, ": ", size, " bytes are no whole number of values of ", dtype);
    const auto values = at::from_blob(bytes.ptr, {size / width}, type);  // only read
    const auto fill = [&](const model::ParameterSpec& spec, const at::Tensor& flat) {
      const std::int64_t begin = first * (spec.numel / spec.shape[0]);
      NRL_CHECK_ARG(begin + values.numel() <= spec.numel, name, ": ", values.numel(), " values from row ", first,
                    " on are more than it has");
      return flat.narrow(0, spec.offset + begin, values.numel());
    };
    if (const auto* blocks = find_blocks(name); blocks != nullptr) {
      if (blocks->shape.size() == 1) return void(model_->blocks(*blocks).copy_(values));
      const auto rows = values.view({-1, blocks->shape[1]});
      const bool is_read = type == at::kFloat || type == at::kBFloat16;
      return ops::pack_blocks(is_read ? rows : rows.to(at::kFloat), model_->blocks(*blocks), blocks->begin + first);
    }
    if (name.find(".lora_") == std::string::npos)
      return void(fill(model_->layout().find(name), model_->compute()).copy_(values));
    const auto& spec = model_->trained_layout().find(name);
    NRL_CHECK_ARG(values.numel() == spec.numel, name, ": ", values.numel(), " values are not ", spec.numel);
    const auto view = fill(spec, model_->masters());
    if (!name.ends_with(".lora_B.weight")) return void(view.copy_(values));
    const auto dim = model_->trained_layout().adapters.front().dim, experts = spec.shape[0] / dim;
    view.view({experts, dim, spec.shape[1]}).copy_(values.view({spec.shape[1], dim, experts}).permute({2, 1, 0}));
  }

  /// Copies a quantised parameter from the bytes of a file with blocks in its format; returns whether it could.
  bool put_blocks(const std::string& name, const std::string& dtype, const py::buffer& data) {
    const auto* spec = find_blocks(name);
    if (spec == nullptr || (dtype != "Q8_0" && dtype != "Q4_0" && dtype != "NF4")) return false;
    const py::buffer_info bytes = data.request();
    const auto& blocks = model_->blocks(*spec);
    if (bytes.size * bytes.itemsize != spec->shape[0] * blocks.size(1)) return false;  // another format
    ops::write_block_rows(at::from_blob(bytes.ptr, {spec->shape[0], blocks.size(1)}, at::kByte), blocks, spec->shape[1],
                          spec->begin);
    return true;
  }

  std::string generate(const std::vector<std::int64_t>& prompt, const SamplingParams& params, std::uint32_t seed,
                       const std::function<void(std::int64_t)>& on_token) {
    return interruptible([&](const auto& interrupted) -> std::string {
      const auto drawn = [&](std::int64_t, std::int64_t token) { on_token(token); };  // takes the GIL itself
      const auto done =
          engine_.generate({prompt}, {{0, params, {seed, RandomStream::eval, 0, 0, 0}}}, interrupted, {}, drawn);
      return done.front().finish_reason == FinishReason::length ? "length" : "stop";
    });
  }

  void set_token_bytes(const std::vector<std::string>& table) {
    engine_.set_token_bytes(std::make_shared<const TokenBytes>(table));
  }

 private:
  const model::BlockSpec* find_blocks(const std::string& name) const {
    const auto& all = model_->layout().blocks;
    const auto found = std::ranges::find(all, name, &model::BlockSpec::name);
    return found == all.end() ? nullptr : &*found;
  }

  std::shared_ptr<model::DecoderModel> model_;
  Engine engine_;
};

}  // namespace
}  // namespace nemo_rl::bindings

PYBIND11_MODULE(_text, m) {
  using namespace nemo_rl::bindings;
  m.doc() = "Generation without torch's Python side; see nemo_rl_cpp/generate.py";
  m.def("set_num_threads", [](int n) { at::set_num_threads(n); }, py::arg("num_threads"));
  py::class_<TextModel>(m, "TextModel", py::module_local())
      .def(py::init<const py::dict&, const std::string&, std::int64_t, const std::string&>(), py::arg("config"),
           py::arg("dtype"), py::arg("max_model_len"), py::arg("device") = "cpu")
      .def_property_readonly("shapes", &TextModel::shapes, "(name, shape) of every parameter")
      .def("adapt", &TextModel::adapt, py::arg("dim"), py::arg("alpha"), py::arg("targets"), py::arg("use_rslora"))
      .def("masters_changed", &TextModel::masters_changed)
      .def("put", &TextModel::put, py::arg("name"), py::arg("dtype"), py::arg("data"), py::arg("first") = 0)
      .def("put_blocks", &TextModel::put_blocks, py::arg("name"), py::arg("dtype"), py::arg("data"))
      .def("set_token_bytes", &TextModel::set_token_bytes, py::arg("token_bytes"))
      .def(
          "generate",
          [](TextModel& self, const std::vector<std::int64_t>& prompt, std::int64_t max_new_tokens, float temperature,
             float top_p, std::int64_t top_k, bool greedy, std::uint32_t seed,
             const std::vector<std::int64_t>& stop_token_ids, const std::vector<std::string>& stop_strings,
             const std::function<void(std::int64_t)>& on_token) {
            const auto stops = stop_strings.empty() ? nullptr : std::make_shared<const StopStrings>(stop_strings);
            return self.generate(prompt, {{temperature, top_p, top_k, greedy}, max_new_tokens, stop_token_ids, stops},
                                 seed, on_token);
          },
          py::arg("prompt_ids"), py::kw_only(), py::arg("max_new_tokens"), py::arg("temperature"), py::arg("top_p"),
          py::arg("top_k"), py::arg("greedy"), py::arg("seed"), py::arg("stop_token_ids"), py::arg("stop_strings"),
          py::arg("on_token"),
          "Calls on_token(id) for every token as it is drawn, and returns why the text ended: \"stop\" or \"length\"");
}
