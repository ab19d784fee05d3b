// Chapter: kernels
// The cells of LSTM and GRU layers: for a PrivateUse1 device, PyTorch's loops
// over time call these fused operators instead of composing them.
//
// G stands for the gates: 4 of an LSTM's (input, forget, cell, output), 3 of a
// GRU's (reset, update, new). B is the batch, H the hidden size.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <array>
#include <tuple>

#include "openreg/csrc/operand.h"
#include "openreg/csrc/ops/arguments.h"

namespace openreg {
namespace {

constexpr char kLstm[] = "lstm_cell";
constexpr char kLstmBackward[] = "lstm_cell_backward";
constexpr char kGru[] = "gru_cell";
constexpr char kGruBackward[] = "gru_cell_backward";

using Bias = std::optional<at::Tensor>;

void checkCell(
    const char* name,
    const at::Tensor& inputGates,
    const at::Tensor& hiddenGates,
    const at::Tensor& hidden,
    std::int64_t gates) {
  TORCH_CHECK(
      inputGates.dim() == 2 && inputGates.sizes() == hiddenGates.sizes() &&
          hidden.dim() == 2 && hidden.size(0) == inputGates.size(0) &&
          hidden.size(1) * gates == inputGates.size(1),
      name,
      ": gates of ",
      inputGates.sizes(),
      " and ",
      hiddenGates.sizes(),
      " do not belong to a hidden state of ",
      hidden.sizes());
}

bool isGiven(const Bias& tensor) {
  return tensor.has_value() && tensor->defined();
}

// On an engine: a linear layer's result and, if there is one, its bias.
at::Tensor biased(const at::Tensor& gates, const Bias& bias) {
  return isGiven(bias) ? gates + *bias : gates;
}

// [kernels: lstm-cell]
// The gates' activations, (B, 4 H), are the workspace that backward needs.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstmCell(
    const at::Tensor& inputGates,
    const at::Tensor& hiddenGates,
    const at::Tensor& cell,
    const Bias& inputBias,
    const Bias& hiddenBias) {
  checkCell("lstm_cell", inputGates, hiddenGates, cell, 4);
  const c10::DeviceGuard guard(commonDevice(
      "lstm_cell", inputGates, hiddenGates, cell, inputBias, hiddenBias));
  at::Tensor hidden = at::empty_like(cell, c10::MemoryFormat::Contiguous);
  at::Tensor next = at::empty_like(cell, c10::MemoryFormat::Contiguous);
  at::Tensor workspace = at::empty(inputGates.sizes(), inputGates.options());
  launch<kLstm>([x = keep(inputGates),
                 h = keep(hiddenGates),
                 c = keep(cell),
                 bx = keep(inputBias),
                 bh = keep(hiddenBias),
                 y = keep(hidden),
                 n = keep(next),
                 w = keep(workspace)] {
    const at::Tensor all =
        biased(x.view(), give(bx)) + biased(h.view(), give(bh));
    const auto gates = all.chunk(4, 1);
    const auto kept = w.view().chunk(4, 1);
    for (std::size_t i = 0; i < 4; ++i) {
      kept[i].copy_(i == 2 ? gates[i].tanh() : gates[i].sigmoid());
    }
    const at::Tensor later = n.view();
    later.copy_(kept[1] * c.view() + kept[0] * kept[2]);
    y.view().copy_(kept[3] * later.tanh());
  });
  return {std::move(hidden), std::move(next), std::move(workspace)};
}
// [/kernels: lstm-cell]

// [autograd: lstm-cell-backward]
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstmCellBackward(
    const Bias& gradHidden,
    const Bias& gradNext,
    const at::Tensor& cell,
    const at::Tensor& next,
    const at::Tensor& workspace,
    bool hasBias) {
  if (!isGiven(gradHidden) && !isGiven(gradNext)) {
    return {}; // autograd asks, and has a gradient for neither output
  }
  const c10::DeviceGuard guard(commonDevice(
      "lstm_cell_backward", gradHidden, gradNext, cell, next, workspace));
  at::Tensor gradGates = at::empty(workspace.sizes(), workspace.options());
  at::Tensor gradCell = at::empty_like(cell, c10::MemoryFormat::Contiguous);
  at::Tensor gradBias;
  if (hasBias) {
    gradBias = at::empty({workspace.size(1)}, workspace.options());
  }
  launch<kLstmBackward>([dy = keep(gradHidden),
                         dn = keep(gradNext),
                         c = keep(cell),
                         n = keep(next),
                         w = keep(workspace),
                         dg = keep(gradGates),
                         dc = keep(gradCell),
                         db = keep(gradBias)] {
    const auto gates = w.view().chunk(4, 1);
    const at::Tensor& in = gates[0];
    const at::Tensor& forget = gates[1];
    const at::Tensor& fresh = gates[2];
    const at::Tensor& out = gates[3];
    const at::Tensor activated = n.view().tanh();
    const auto given = [](const std::optional<Operand>& gradient) {
      const Bias found = give(gradient);
      return found.has_value() ? *found : at::Tensor();
    };
    const at::Tensor fromHidden = given(dy), fromNext = given(dn);
    at::Tensor gradient = fromNext;
    if (fromHidden.defined()) {
      const at::Tensor through = fromHidden * out * (1 - activated * activated);
      gradient = fromNext.defined() ? through + fromNext : through;
    }
    const auto results = dg.view().chunk(4, 1);
    results[0].copy_(gradient * fresh * in * (1 - in));
    results[1].copy_(gradient * c.view() * forget * (1 - forget));
    results[2].copy_(gradient * in * (1 - fresh * fresh));
    if (fromHidden.defined()) {
      results[3].copy_(fromHidden * activated * out * (1 - out));
    } else {
      results[3].zero_();
    }
    dc.view().copy_(gradient * forget);
    if (const at::Tensor bias = db.view(); bias.defined()) {
      bias.copy_(dg.view().sum(0));
    }
  });
  return {std::move(gradGates), std::move(gradCell), std::move(gradBias)};
}
// [/autograd: lstm-cell-backward]

// [kernels: gru-cell]
// The workspace, (B, 5 H): reset, update, new, the hidden state, and the
// hidden part of the new gate before it was reset.
std::tuple<at::Tensor, at::Tensor> gruCell(
    const at::Tensor& inputGates,
    const at::Tensor& hiddenGates,
    const at::Tensor& hidden,
    const Bias& inputBias,
    const Bias& hiddenBias) {
  checkCell("gru_cell", inputGates, hiddenGates, hidden, 3);
  const c10::DeviceGuard guard(commonDevice(
      "gru_cell", inputGates, hiddenGates, hidden, inputBias, hiddenBias));
  at::Tensor next = at::empty_like(hidden, c10::MemoryFormat::Contiguous);
  at::Tensor workspace =
      at::empty({hidden.size(0), hidden.size(1) * 5}, hidden.options());
  launch<kGru>([x = keep(inputGates),
                h = keep(hiddenGates),
                state = keep(hidden),
                bx = keep(inputBias),
                bh = keep(hiddenBias),
                y = keep(next),
                w = keep(workspace)] {
    const auto in = biased(x.view(), give(bx)).chunk(3, 1);
    const auto from = biased(h.view(), give(bh)).chunk(3, 1);
    const auto kept = w.view().chunk(5, 1);
    const at::Tensor before = state.view();
    kept[0].copy_((in[0] + from[0]).sigmoid());
    kept[1].copy_((in[1] + from[1]).sigmoid());
    kept[2].copy_((in[2] + kept[0] * from[2]).tanh());
    kept[3].copy_(before);
    kept[4].copy_(from[2]);
    y.view().copy_((before - kept[2]) * kept[1] + kept[2]);
  });
  return {std::move(next), std::move(workspace)};
}
// [/kernels: gru-cell]

// [autograd: gru-cell-backward]
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>
gruCellBackward(
    const at::Tensor& gradNext, const at::Tensor& workspace, bool hasBias) {
  const c10::DeviceGuard guard(
      commonDevice("gru_cell_backward", gradNext, workspace));
  const std::int64_t batch = workspace.size(0), size = workspace.size(1) / 5;
  const auto options = workspace.options();
  std::array<at::Tensor, 2> gradGates, gradBias; // of input, of hidden state
  for (std::size_t i = 0; i < 2; ++i) {
    gradGates[i] = at::empty({batch, size * 3}, options);
    if (hasBias) {
      gradBias[i] = at::empty({size * 3}, options);
    }
  }
  at::Tensor gradHidden =
      at::empty_like(gradNext, c10::MemoryFormat::Contiguous);
  launch<kGruBackward>([dy = keep(gradNext),
                        w = keep(workspace),
                        dx = keep(gradGates[0]),
                        dh = keep(gradGates[1]),
                        ds = keep(gradHidden),
                        dbx = keep(gradBias[0]),
                        dbh = keep(gradBias[1])] {
    const auto kept = w.view().chunk(5, 1);
    const at::Tensor& reset = kept[0];
    const at::Tensor& update = kept[1];
    const at::Tensor& fresh = kept[2];
    const at::Tensor gradient = dy.view();
    const at::Tensor forUpdate =
        gradient * (kept[3] - fresh) * (1 - update) * update;
    const at::Tensor forFresh = gradient * (1 - update) * (1 - fresh * fresh);
    const at::Tensor forReset = forFresh * kept[4] * (1 - reset) * reset;
    const auto in = dx.view().chunk(3, 1), from = dh.view().chunk(3, 1);
    for (const auto* each : {&in, &from}) {
      (*each)[0].copy_(forReset);
      (*each)[1].copy_(forUpdate);
    }
    in[2].copy_(forFresh);
    from[2].copy_(forFresh * reset);
    ds.view().copy_(gradient * update);
    if (const at::Tensor bias = dbx.view(); bias.defined()) {
      bias.copy_(dx.view().sum(0));
      dbh.view().copy_(dh.view().sum(0));
    }
  });
  return {
      gradGates[0],
      gradGates[1],
      std::move(gradHidden),
      gradBias[0],
      gradBias[1]};
}
// [/autograd: gru-cell-backward]

} // namespace

// [kernels: register-recurrent]
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", &lstmCell);
  m.impl("_thnn_fused_gru_cell", &gruCell);
  // [autograd: register-recurrent]
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstmCellBackward);
  m.impl("_thnn_fused_gru_cell_backward", &gruCellBackward);
  // [/autograd: register-recurrent]
}
// [/kernels: register-recurrent]

} // namespace openreg
