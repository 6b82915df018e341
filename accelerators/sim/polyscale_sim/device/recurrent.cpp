// Cells of LSTM and GRU layers. torch asks devices that are not the CPU for fused ones; here they are composed of plain
// operators, which autograd differentiates. (LSTM: Hochreiter and Schmidhuber 1997; GRU: Cho et al. 2014, with the
// reset gate behind the product, as torch has it.)

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/tanh.h>
#include <torch/library.h>

namespace sim {
namespace {

using at::Tensor;

Tensor biased(const Tensor& gates, const std::optional<Tensor>& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cell,
    const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  const auto gates = (biased(input_gates, input_bias) + biased(hidden_gates, hidden_bias)).unsafe_chunk(4, 1);
  const auto next = gates[1].sigmoid() * cell + gates[0].sigmoid() * gates[2].tanh();
  return {gates[3].sigmoid() * next.tanh(), next, at::empty({0}, cell.options())};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hidden,
    const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  const auto from_input = biased(input_gates, input_bias).unsafe_chunk(3, 1);
  const auto from_hidden = biased(hidden_gates, hidden_bias).unsafe_chunk(3, 1);
  const auto reset = (from_hidden[0] + from_input[0]).sigmoid();
  const auto update = (from_hidden[1] + from_input[1]).sigmoid();
  const auto fresh = (from_input[2] + from_hidden[2] * reset).tanh();
  return {(hidden - fresh) * update + fresh, at::empty({0}, hidden.options())};
}

}  // namespace
}  // namespace sim

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", sim::lstm_cell);
  m.impl("_thnn_fused_gru_cell", sim::gru_cell);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", sim::lstm_cell);
  m.impl("_thnn_fused_gru_cell", sim::gru_cell);
}
