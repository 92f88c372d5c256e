// The torch side of the operators: schemas, argument checks, filling of the parameter structs, dispatch to the CPU or
// CUDA launchers. The only translation unit with a torch header, so that kernels compile fast and know no tensor library.
//
// Every check runs before anything is written and names the argument, the value found and the values allowed. Values
// inside tensors (parents, indices) cannot be checked here without a device synchronisation; the kernels skip such rows
// and count them (params.h, ErrorKind).

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <optional>
#include <string>

#include "params.h"

namespace treewy {

#ifdef TREEWY_WITH_CUDA
const char* cuda_error_string(int code);  // cuda_error.cpp
#endif
const char* cpu_isa();  // cpu_launch.cpp

namespace {

using at::Tensor;
using OptTensor = std::optional<Tensor>;

// ---- messages --------------------------------------------------------------------------------------------------

const char* dtype_name(at::ScalarType t) {
  switch (t) {
    case at::kFloat: return "torch.float32";
    case at::kDouble: return "torch.float64";
    case at::kBFloat16: return "torch.bfloat16";
    case at::kHalf: return "torch.float16";
    case at::kInt: return "torch.int32";
    case at::kLong: return "torch.int64";
    case at::kShort: return "torch.int16";
    case at::kChar: return "torch.int8";
    case at::kByte: return "torch.uint8";
    case at::kBool: return "torch.bool";
    default: return c10::toString(t);
  }
}

// The checks of one call: `op` and the device every tensor has to be on. Arguments are named as in the schema.
struct Checker {
  const char* op;
  at::Device device;
  const char* device_of;  // the argument that set the device

  template <typename... Args>
  void require(bool ok, const char* name, const Args&... args) const {
    TORCH_CHECK(ok, "treewy::", op, ": argument '", name, "': ", args...);
  }

  void tensor(const Tensor& t, const char* name, const char* shape, int64_t rank, at::ArrayRef<at::ScalarType> dtypes,
              bool last_stride = true) const {
    require(t.defined() && t.layout() == at::kStrided, name, "must be a dense (strided) tensor");
    require(t.device() == device, name, "device is ", t.device(), "; allowed: ", device, ", the device of '", device_of,
            "'");
    bool found = false;
    std::string allowed;
    for (at::ScalarType d : dtypes) {
      found = found || d == t.scalar_type();
      allowed += (allowed.empty() ? "" : ", ");
      allowed += dtype_name(d);
    }
    require(found, name, "dtype is ", dtype_name(t.scalar_type()), "; allowed: ", allowed);
    require(t.dim() == rank, name, "rank is ", t.dim(), " (shape ", t.sizes(), "); allowed: ", rank, ", shape ", shape);
    if (last_stride) stride(t, name, -1, 1);
  }
  void size(const Tensor& t, const char* name, int64_t dim, int64_t expected, const char* meaning) const {
    require(t.size(dim) == expected, name, "size of dimension ", dim, " is ", t.size(dim), " (shape ", t.sizes(),
            "); allowed: ", expected, " (", meaning, ")");
  }
  void size_at_least(const Tensor& t, const char* name, int64_t dim, int64_t least, const char* meaning) const {
    require(t.size(dim) >= least, name, "size of dimension ", dim, " is ", t.size(dim), " (shape ", t.sizes(),
            "); allowed: at least ", least, " (", meaning, ")");
  }
  // The stride of a dimension that has fewer than two entries is never used and may be anything.
  void stride(const Tensor& t, const char* name, int64_t dim, int64_t expected) const {
    require(t.size(dim) <= 1 || t.stride(dim) == expected, name, "stride of dimension ", dim < 0 ? dim + t.dim() : dim,
            " is ", t.stride(dim), "; allowed: ", expected);
  }
  // Written tensors must not map two indices to one address (an expanded tensor): the result would be a race.
  void written(const Tensor& t, const char* name) const {
    require(at::has_internal_overlap(t) != at::MemOverlap::Yes, name, "is written, but its strides ", t.strides(),
            " map several elements to one address; allowed: a tensor without overlap");
  }
  IndexVector index(const Tensor& t, const char* name, int64_t n) const {
    tensor(t, name, "[N]", 1, {at::kInt, at::kLong});
    size(t, name, 0, n, "N, the length of 'state_indices'");
    return {t.const_data_ptr(), t.scalar_type() == at::kLong};
  }
  int64_t* errors(const Tensor& t) const {
    tensor(t, "errors", "[8]", 1, {at::kLong});
    size(t, "errors", 0, kErrorKinds, "one counter per kind of fault");
    return t.data_ptr<int64_t>();
  }
  void head_dims(int64_t K, int64_t V, const char* name) const {
    require(K == 64 || K == 128 || K == 256, name, "K is ", K, "; allowed: 64, 128, 256");
    require(V == K, name, "V is ", V, " and K is ", K, "; allowed: V = K");
  }
  void nodes(int64_t T, const char* name) const {
    require(T >= 1 && T <= kMaxNodes, name, "T (draft nodes a request) is ", T, "; allowed: 1 to ", kMaxNodes);
  }
  void value_heads(int64_t HV, int64_t H, const char* name) const {
    require(H >= 1 && HV % H == 0, name, "HV (value heads) is ", HV, " and H (key heads) is ", H,
            "; allowed: HV a multiple of H");
  }
};

constexpr at::ScalarType kFloats[] = {at::kFloat, at::kBFloat16, at::kHalf};

DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat: return DType::kFloat32;
    case at::kBFloat16: return DType::kBFloat16;
    default: return DType::kFloat16;
  }
}

// ---- verify ----------------------------------------------------------------------------------------------------

struct VerifyArgs {
  const char* op;
  const Tensor *q = nullptr, *k = nullptr, *v = nullptr;             // plain form
  const Tensor *mixed_qkv = nullptr, *conv_weight = nullptr, *conv_state = nullptr;  // convolution form
  const OptTensor* conv_bias = nullptr;
  const Tensor &a, &b, &A_log, &dt_bias, &state, &state_indices;
  const OptTensor& parents;
  double scale;
  const Tensor &out, &stash_u, &stash_k, &stash_k_rnorm, &stash_g;
  const Tensor* stash_conv = nullptr;
  const Tensor& errors;
};

VerifyParams check_verify(const VerifyArgs& x) {
  VerifyParams p;
  const bool conv = x.mixed_qkv != nullptr;
  const Tensor& lead = conv ? *x.mixed_qkv : *x.q;
  const char* lead_name = conv ? "mixed_qkv" : "q";
  const Checker c{x.op, lead.device(), lead_name};

  c.tensor(lead, lead_name, conv ? "[N*T, D]" : "[N*T, H, K]", conv ? 2 : 3, kFloats);
  const at::ScalarType act = lead.scalar_type();
  c.tensor(x.state, "state", "[slots, HV, V, K]", 4, kFloats);
  const int64_t slots = x.state.size(0), HV = x.state.size(1), V = x.state.size(2), K = x.state.size(3);
  c.head_dims(K, V, "state");
  c.stride(x.state, "state", 2, K);
  c.require(HV >= 1, "state", "HV (value heads) is 0; allowed: at least 1");

  c.tensor(x.state_indices, "state_indices", "[N]", 1, {at::kInt, at::kLong});
  const int64_t N = x.state_indices.size(0), tokens = lead.size(0);
  c.require(N > 0 ? tokens % N == 0 : tokens == 0, lead_name, "has ", tokens,
            " tokens; allowed: a multiple of N = ", N, ", the length of 'state_indices'");
  // No request says how long its draft is; 'parents' may, and nothing is done whatever it says.
  const bool parents_say = N == 0 && x.parents.has_value() && x.parents->dim() == 2;
  const int64_t T = N > 0 ? tokens / N : parents_say ? x.parents->size(1) : 1;
  c.nodes(T, N > 0 || !parents_say ? lead_name : "parents");
  p.state_indices = c.index(x.state_indices, "state_indices", N);

  int64_t H = 0, D = 0;
  if (conv) {
    D = lead.size(1);
    H = (D - HV * V) / (2 * K);
    c.require(D > HV * V && (D - HV * V) % (2 * K) == 0, "mixed_qkv", "D (channels) is ", D,
              "; allowed: 2*H*K + HV*V with K = ", K, " and HV*V = ", HV * V);
  } else {
    H = lead.size(1);
    c.size(lead, "q", 2, K, "K, the last dimension of 'state'");
  }
  c.value_heads(HV, H, conv ? "mixed_qkv" : "q");

  if (conv) {
    c.tensor(*x.conv_weight, "conv_weight", "[D, W]", 2, {act});
    c.size(*x.conv_weight, "conv_weight", 0, D, "D, the channels of 'mixed_qkv'");
    const int64_t W = x.conv_weight->size(1);
    c.require(W >= 2 && W <= kMaxConvWidth, "conv_weight", "W (convolution width) is ", W, "; allowed: 2 to ",
              kMaxConvWidth);
    c.tensor(*x.conv_state, "conv_state", "[slots, D, W-1]", 3, {act}, /*last_stride=*/false);
    c.size(*x.conv_state, "conv_state", 0, slots, "the slots of 'state'");
    c.size(*x.conv_state, "conv_state", 1, D, "D, the channels of 'mixed_qkv'");
    c.size(*x.conv_state, "conv_state", 2, W - 1, "W-1");
    if (x.conv_bias->has_value()) {
      c.tensor(**x.conv_bias, "conv_bias", "[D]", 1, {act});
      c.size(**x.conv_bias, "conv_bias", 0, D, "D, the channels of 'mixed_qkv'");
      p.conv_bias = (*x.conv_bias)->const_data_ptr();
    }
    p.mixed_qkv = lead.const_data_ptr();
    p.mixed_qkv_stride_token = lead.stride(0);
    p.conv_weight = x.conv_weight->const_data_ptr();
    p.conv_weight_stride_channel = x.conv_weight->stride(0);
    p.conv_state = x.conv_state->const_data_ptr();
    p.conv_state_stride_slot = x.conv_state->stride(0);
    p.conv_state_stride_channel = x.conv_state->stride(1);
    p.conv_state_stride_column = x.conv_state->stride(2);
    p.W = static_cast<int32_t>(W);
  } else {
    c.tensor(*x.k, "k", "[N*T, H, K]", 3, {act});
    c.size(*x.k, "k", 0, tokens, "N*T, the tokens of 'q'");
    c.size(*x.k, "k", 1, H, "H, the heads of 'q'");
    c.size(*x.k, "k", 2, K, "K, the last dimension of 'state'");
    c.tensor(*x.v, "v", "[N*T, HV, V]", 3, {act});
    c.size(*x.v, "v", 0, tokens, "N*T, the tokens of 'q'");
    c.size(*x.v, "v", 1, HV, "HV, the heads of 'state'");
    c.size(*x.v, "v", 2, V, "V, the third dimension of 'state'");
    p.q = x.q->const_data_ptr();
    p.q_stride_token = x.q->stride(0), p.q_stride_head = x.q->stride(1);
    p.k = x.k->const_data_ptr();
    p.k_stride_token = x.k->stride(0), p.k_stride_head = x.k->stride(1);
    p.v = x.v->const_data_ptr();
    p.v_stride_token = x.v->stride(0), p.v_stride_head = x.v->stride(1);
  }

  const auto gate = [&](const Tensor& t, const char* name) {
    c.tensor(t, name, "[N*T, HV]", 2, {act});
    c.size(t, name, 0, tokens, "N*T, the tokens");
    c.size(t, name, 1, HV, "HV, the heads of 'state'");
  };
  gate(x.a, "a");
  gate(x.b, "b");
  c.tensor(x.A_log, "A_log", "[HV]", 1, kFloats);
  c.size(x.A_log, "A_log", 0, HV, "HV, the heads of 'state'");
  c.tensor(x.dt_bias, "dt_bias", "[HV]", 1, kFloats);
  c.size(x.dt_bias, "dt_bias", 0, HV, "HV, the heads of 'state'");

  if (x.parents.has_value()) {
    c.tensor(*x.parents, "parents", "[N, T]", 2, {at::kInt});
    c.size(*x.parents, "parents", 0, N, "N, the length of 'state_indices'");
    c.size(*x.parents, "parents", 1, T, "T, the tokens of a request");
    p.parents = x.parents->const_data_ptr<int32_t>();
    p.parents_stride_row = x.parents->stride(0);
  }

  c.tensor(x.out, "out", "[N*T, HV, V]", 3,
           act == at::kFloat ? at::ArrayRef<at::ScalarType>({at::kFloat})
                             : at::ArrayRef<at::ScalarType>({act, at::kFloat}));
  c.size(x.out, "out", 0, tokens, "N*T, the tokens");
  c.size(x.out, "out", 1, HV, "HV, the heads of 'state'");
  c.size(x.out, "out", 2, V, "V, the third dimension of 'state'");
  c.written(x.out, "out");

  const auto stash = [&](const Tensor& t, const char* name, const char* shape, int64_t rank, at::ScalarType dtype,
                         int64_t heads, int64_t last) {
    c.tensor(t, name, shape, rank, {dtype});
    c.size_at_least(t, name, 0, N, "rows; N, the length of 'state_indices'");
    c.size(t, name, 1, heads, heads == HV ? "HV, the heads of 'state'" : "H, the key heads");
    c.size_at_least(t, name, 2, T, "nodes; T, the tokens of a request");
    if (rank == 4) {
      c.size(t, name, 3, last, "the head dimension");
      c.stride(t, name, 2, last);
    }
    c.written(t, name);
  };
  stash(x.stash_u, "stash_u", "[R, HV, Tc, V]", 4, at::kFloat, HV, V);
  stash(x.stash_k, "stash_k", "[R, H, Tc, K]", 4, act, H, K);
  stash(x.stash_k_rnorm, "stash_k_rnorm", "[R, H, Tc]", 3, at::kFloat, H, 0);
  stash(x.stash_g, "stash_g", "[R, HV, Tc]", 3, at::kFloat, HV, 0);
  if (conv) {
    c.tensor(*x.stash_conv, "stash_conv", "[R, Tc, D]", 3, {act});
    c.size_at_least(*x.stash_conv, "stash_conv", 0, N, "rows; N, the length of 'state_indices'");
    c.size_at_least(*x.stash_conv, "stash_conv", 1, T, "nodes; T, the tokens of a request");
    c.size(*x.stash_conv, "stash_conv", 2, D, "D, the channels of 'mixed_qkv'");
    c.written(*x.stash_conv, "stash_conv");
    p.stash.conv = x.stash_conv->data_ptr();
    p.stash.conv_stride_row = x.stash_conv->stride(0), p.stash.conv_stride_node = x.stash_conv->stride(1);
  }
  p.errors = c.errors(x.errors);

  p.N = static_cast<int32_t>(N), p.T = static_cast<int32_t>(T), p.H = static_cast<int32_t>(H);
  p.HV = static_cast<int32_t>(HV), p.K = static_cast<int32_t>(K), p.V = static_cast<int32_t>(V);
  p.slots = slots;
  p.scale = static_cast<float>(x.scale);
  p.act_dtype = dtype_of(lead), p.state_dtype = dtype_of(x.state), p.out_dtype = dtype_of(x.out);
  p.A_log_dtype = dtype_of(x.A_log), p.dt_bias_dtype = dtype_of(x.dt_bias);
  p.a = x.a.const_data_ptr(), p.b = x.b.const_data_ptr();
  p.a_stride_token = x.a.stride(0), p.b_stride_token = x.b.stride(0);
  p.A_log = x.A_log.const_data_ptr(), p.dt_bias = x.dt_bias.const_data_ptr();
  p.state = x.state.const_data_ptr();
  p.state_stride_slot = x.state.stride(0), p.state_stride_head = x.state.stride(1);
  p.out = x.out.data_ptr();
  p.out_stride_token = x.out.stride(0), p.out_stride_head = x.out.stride(1);
  p.stash.u = x.stash_u.data_ptr<float>();
  p.stash.u_stride_row = x.stash_u.stride(0), p.stash.u_stride_head = x.stash_u.stride(1);
  p.stash.k = x.stash_k.data_ptr();
  p.stash.k_stride_row = x.stash_k.stride(0), p.stash.k_stride_head = x.stash_k.stride(1);
  p.stash.k_rnorm = x.stash_k_rnorm.data_ptr<float>();
  p.stash.k_rnorm_stride_row = x.stash_k_rnorm.stride(0), p.stash.k_rnorm_stride_head = x.stash_k_rnorm.stride(1);
  p.stash.g = x.stash_g.data_ptr<float>();
  p.stash.g_stride_row = x.stash_g.stride(0), p.stash.g_stride_head = x.stash_g.stride(1);
  return p;
}

// ---- commit ----------------------------------------------------------------------------------------------------

CommitParams check_commit(const Tensor& stash_u, const Tensor& stash_k, const Tensor& stash_k_rnorm,
                          const Tensor& stash_g, const OptTensor& stash_conv, const OptTensor& parents,
                          const Tensor& accepted, const Tensor& state_indices, const OptTensor& track_indices,
                          const OptTensor& track_nodes, const Tensor& state, const OptTensor& conv_state,
                          const Tensor& errors) {
  CommitParams p;
  const Checker c{"commit", state.device(), "state"};
  c.tensor(state, "state", "[L, slots, HV, V, K]", 5, kFloats);
  const int64_t L = state.size(0), slots = state.size(1), HV = state.size(2), V = state.size(3), K = state.size(4);
  c.head_dims(K, V, "state");
  c.stride(state, "state", 3, K);
  c.written(state, "state");

  c.tensor(state_indices, "state_indices", "[N]", 1, {at::kInt, at::kLong});
  const int64_t N = state_indices.size(0);

  c.tensor(stash_u, "stash_u", "[L, R, HV, Tc, V]", 5, {at::kFloat});
  c.tensor(stash_k, "stash_k", "[L, R, H, Tc, K]", 5, kFloats);
  const at::ScalarType act = stash_k.scalar_type();
  const int64_t H = stash_k.size(2);
  c.value_heads(HV, H, "stash_k");
  const int64_t T = parents.has_value() && parents->dim() == 2 ? parents->size(1) : stash_u.size(3);
  c.nodes(T, parents.has_value() ? "parents" : "stash_u");

  const auto stash = [&](const Tensor& t, const char* name, const char* shape, int64_t rank, at::ScalarType dtype,
                         int64_t heads, int64_t last) {
    c.tensor(t, name, shape, rank, {dtype});
    c.size(t, name, 0, L, "L, the layers of 'state'");
    c.size_at_least(t, name, 1, N, "rows; N, the length of 'state_indices'");
    c.size(t, name, 2, heads, heads == HV ? "HV, the heads of 'state'" : "H, the heads of 'stash_k'");
    c.size_at_least(t, name, 3, T, "nodes; T, the columns of 'parents'");
    if (rank == 5) {
      c.size(t, name, 4, last, "the head dimension");
      c.stride(t, name, 3, last);
    }
  };
  stash(stash_u, "stash_u", "[L, R, HV, Tc, V]", 5, at::kFloat, HV, V);
  stash(stash_k, "stash_k", "[L, R, H, Tc, K]", 5, act, H, K);
  stash(stash_k_rnorm, "stash_k_rnorm", "[L, R, H, Tc]", 4, at::kFloat, H, 0);
  stash(stash_g, "stash_g", "[L, R, HV, Tc]", 4, at::kFloat, HV, 0);

  if (parents.has_value()) {
    c.tensor(*parents, "parents", "[N, T]", 2, {at::kInt});
    c.size(*parents, "parents", 0, N, "N, the length of 'state_indices'");
    p.parents = parents->const_data_ptr<int32_t>();
    p.parents_stride_row = parents->stride(0);
  }
  p.accepted = c.index(accepted, "accepted", N);
  p.state_indices = c.index(state_indices, "state_indices", N);
  c.require(track_indices.has_value() == track_nodes.has_value(), track_indices.has_value() ? "track_nodes" : "track_indices",
            "is None although '", track_indices.has_value() ? "track_indices" : "track_nodes",
            "' is given; allowed: both or neither");
  if (track_indices.has_value()) {
    p.track_indices = c.index(*track_indices, "track_indices", N);
    p.track_nodes = c.index(*track_nodes, "track_nodes", N);
  }

  c.require(stash_conv.has_value() == conv_state.has_value(), conv_state.has_value() ? "stash_conv" : "conv_state",
            "is None although '", conv_state.has_value() ? "conv_state" : "stash_conv",
            "' is given; allowed: both or neither");
  if (conv_state.has_value()) {
    c.tensor(*conv_state, "conv_state", "[L, slots, D, W-1]", 4, kFloats, /*last_stride=*/false);
    const int64_t D = conv_state->size(2), W = conv_state->size(3) + 1;
    c.size(*conv_state, "conv_state", 0, L, "L, the layers of 'state'");
    c.size(*conv_state, "conv_state", 1, slots, "the slots of 'state'");
    c.require(W >= 2 && W <= kMaxConvWidth, "conv_state", "W (its last dimension plus 1) is ", W, "; allowed: 2 to ",
              kMaxConvWidth);
    c.written(*conv_state, "conv_state");
    c.tensor(*stash_conv, "stash_conv", "[L, R, Tc, D]", 4, {act});
    c.size(*stash_conv, "stash_conv", 0, L, "L, the layers of 'state'");
    c.size_at_least(*stash_conv, "stash_conv", 1, N, "rows; N, the length of 'state_indices'");
    c.size_at_least(*stash_conv, "stash_conv", 2, T, "nodes; T, the columns of 'parents'");
    c.size(*stash_conv, "stash_conv", 3, D, "D, the channels of 'conv_state'");
    p.D = static_cast<int32_t>(D), p.W = static_cast<int32_t>(W);
    p.conv_dtype = dtype_of(*conv_state);
    p.conv_state = conv_state->data_ptr();
    p.conv_state_stride_layer = conv_state->stride(0), p.conv_state_stride_slot = conv_state->stride(1);
    p.conv_state_stride_channel = conv_state->stride(2), p.conv_state_stride_column = conv_state->stride(3);
    p.stash.conv = const_cast<void*>(stash_conv->const_data_ptr());
    p.conv_stride_layer = stash_conv->stride(0);
    p.stash.conv_stride_row = stash_conv->stride(1), p.stash.conv_stride_node = stash_conv->stride(2);
  }
  p.errors = c.errors(errors);

  p.L = static_cast<int32_t>(L), p.N = static_cast<int32_t>(N), p.T = static_cast<int32_t>(T);
  p.H = static_cast<int32_t>(H), p.HV = static_cast<int32_t>(HV);
  p.K = static_cast<int32_t>(K), p.V = static_cast<int32_t>(V);
  p.slots = slots;
  p.act_dtype = dtype_of(stash_k), p.state_dtype = dtype_of(state);
  p.stash.u = const_cast<float*>(stash_u.const_data_ptr<float>());
  p.u_stride_layer = stash_u.stride(0), p.stash.u_stride_row = stash_u.stride(1), p.stash.u_stride_head = stash_u.stride(2);
  p.stash.k = const_cast<void*>(stash_k.const_data_ptr());
  p.k_stride_layer = stash_k.stride(0), p.stash.k_stride_row = stash_k.stride(1), p.stash.k_stride_head = stash_k.stride(2);
  p.stash.k_rnorm = const_cast<float*>(stash_k_rnorm.const_data_ptr<float>());
  p.k_rnorm_stride_layer = stash_k_rnorm.stride(0), p.stash.k_rnorm_stride_row = stash_k_rnorm.stride(1);
  p.stash.k_rnorm_stride_head = stash_k_rnorm.stride(2);
  p.stash.g = const_cast<float*>(stash_g.const_data_ptr<float>());
  p.g_stride_layer = stash_g.stride(0), p.stash.g_stride_row = stash_g.stride(1), p.stash.g_stride_head = stash_g.stride(2);
  p.state = state.data_ptr();
  p.state_stride_layer = state.stride(0), p.state_stride_slot = state.stride(1), p.state_stride_head = state.stride(2);
  return p;
}

// ---- links -----------------------------------------------------------------------------------------------------

LinksParams check_links(const Tensor& next_token, const Tensor& next_sibling, const Tensor& parents,
                        const OptTensor& ancestors, const Tensor& errors) {
  LinksParams p;
  const Checker c{"parents_from_links", next_token.device(), "next_token"};
  c.tensor(next_token, "next_token", "[N, T]", 2, {at::kInt, at::kLong});
  const int64_t N = next_token.size(0), T = next_token.size(1);
  c.nodes(T, "next_token");
  c.tensor(next_sibling, "next_sibling", "[N, T]", 2, {next_token.scalar_type()});
  c.size(next_sibling, "next_sibling", 0, N, "N, the rows of 'next_token'");
  c.size(next_sibling, "next_sibling", 1, T, "T, the columns of 'next_token'");
  c.tensor(parents, "parents", "[N, T]", 2, {at::kInt});
  c.size(parents, "parents", 0, N, "N, the rows of 'next_token'");
  c.size(parents, "parents", 1, T, "T, the columns of 'next_token'");
  c.written(parents, "parents");
  if (ancestors.has_value()) {
    c.tensor(*ancestors, "ancestors", "[N, T, ceil(T/32)]", 3, {at::kInt});
    c.size(*ancestors, "ancestors", 0, N, "N, the rows of 'next_token'");
    c.size(*ancestors, "ancestors", 1, T, "T, the columns of 'next_token'");
    c.size(*ancestors, "ancestors", 2, (T + 31) / 32, "ceil(T/32)");
    c.require(ancestors->is_contiguous(), "ancestors", "strides are ", ancestors->strides(), "; allowed: contiguous");
    p.ancestors = ancestors->data_ptr<int32_t>();
  }
  p.errors = c.errors(errors);
  p.N = static_cast<int32_t>(N), p.T = static_cast<int32_t>(T);
  p.next_token = next_token.const_data_ptr(), p.next_sibling = next_sibling.const_data_ptr();
  p.is_int64 = next_token.scalar_type() == at::kLong;
  p.next_token_stride_row = next_token.stride(0), p.next_sibling_stride_row = next_sibling.stride(0);
  p.parents = parents.data_ptr<int32_t>();
  p.parents_stride_row = parents.stride(0);
  return p;
}

// ---- launching -------------------------------------------------------------------------------------------------

struct Cpu {
  static void refuse(const char*) {}
  static void launch(const char* op, const VerifyParams& p, at::Device) { done(op, launch_verify_cpu(p)); }
  static void launch(const char* op, const CommitParams& p, at::Device) { done(op, launch_commit_cpu(p)); }
  static void launch(const char* op, const LinksParams& p, at::Device) { done(op, launch_links_cpu(p)); }
  static void done(const char* op, int code) { TORCH_CHECK(code == 0, "treewy::", op, ": CPU error ", code); }
};

#ifdef TREEWY_WITH_CUDA
struct Cuda {
  static void refuse(const char*) {}
  static void launch(const char* op, const VerifyParams& p, at::Device d) { on_stream(op, d, launch_verify_cuda, p); }
  static void launch(const char* op, const CommitParams& p, at::Device d) { on_stream(op, d, launch_commit_cuda, p); }
  static void launch(const char* op, const LinksParams& p, at::Device d) { on_stream(op, d, launch_links_cuda, p); }
  // Device and stream come from torch's device-generic interface, so that no CUDA header is needed beside torch's.
  template <typename P>
  static void on_stream(const char* op, at::Device device, int (*launcher)(const P&, void*), const P& p) {
    const c10::DeviceGuard guard(device);
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    const int code = launcher(p, stream.native_handle());
    TORCH_CHECK(code == 0, "treewy::", op, ": CUDA error ", code, " (", cuda_error_string(code), ") at launch");
  }
};
#else
struct Cuda {
  static void refuse(const char* op) {
    TORCH_CHECK(false, "treewy::", op, ": got CUDA tensors, but this build of treewy_sglang is CPU-only. Rebuild it where "
                "nvcc is found (or with TREEWY_CUDA=1 and CUDA_HOME set): pip install --no-build-isolation -e .");
  }
  template <typename P>
  static void launch(const char*, const P&, at::Device) {}
};
#endif

template <typename Backend>
void tree_verify(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& b,
                 const Tensor& A_log, const Tensor& dt_bias, const Tensor& state, const Tensor& state_indices,
                 const OptTensor& parents, double scale, Tensor out, Tensor stash_u, Tensor stash_k,
                 Tensor stash_k_rnorm, Tensor stash_g, Tensor errors) {
  Backend::refuse("tree_verify");
  const VerifyParams p = check_verify(VerifyArgs{"tree_verify", &q, &k, &v, nullptr, nullptr, nullptr, nullptr, a, b,
                                                 A_log, dt_bias, state, state_indices, parents, scale, out, stash_u,
                                                 stash_k, stash_k_rnorm, stash_g, nullptr, errors});
  if (p.N > 0) Backend::launch("tree_verify", p, q.device());
}

template <typename Backend>
void tree_conv_verify(const Tensor& mixed_qkv, const Tensor& conv_weight, const OptTensor& conv_bias,
                      const Tensor& conv_state, const Tensor& a, const Tensor& b, const Tensor& A_log,
                      const Tensor& dt_bias, const Tensor& state, const Tensor& state_indices,
                      const OptTensor& parents, double scale, Tensor out, Tensor stash_u, Tensor stash_k,
                      Tensor stash_k_rnorm, Tensor stash_g, Tensor stash_conv, Tensor errors) {
  Backend::refuse("tree_conv_verify");
  const VerifyParams p = check_verify(VerifyArgs{"tree_conv_verify", nullptr, nullptr, nullptr, &mixed_qkv,
                                                 &conv_weight, &conv_state, &conv_bias, a, b, A_log, dt_bias, state,
                                                 state_indices, parents, scale, out, stash_u, stash_k, stash_k_rnorm,
                                                 stash_g, &stash_conv, errors});
  if (p.N > 0) Backend::launch("tree_conv_verify", p, mixed_qkv.device());
}

template <typename Backend>
void commit(const Tensor& stash_u, const Tensor& stash_k, const Tensor& stash_k_rnorm, const Tensor& stash_g,
            const OptTensor& stash_conv, const OptTensor& parents, const Tensor& accepted, const Tensor& state_indices,
            const OptTensor& track_indices, const OptTensor& track_nodes, Tensor state, OptTensor conv_state,
            Tensor errors) {
  Backend::refuse("commit");
  const CommitParams p = check_commit(stash_u, stash_k, stash_k_rnorm, stash_g, stash_conv, parents, accepted,
                                      state_indices, track_indices, track_nodes, state, conv_state, errors);
  if (p.N > 0 && p.L > 0) Backend::launch("commit", p, state.device());
}

template <typename Backend>
void parents_from_links(const Tensor& next_token, const Tensor& next_sibling, Tensor parents, OptTensor ancestors,
                        Tensor errors) {
  Backend::refuse("parents_from_links");
  const LinksParams p = check_links(next_token, next_sibling, parents, ancestors, errors);
  if (p.N > 0) Backend::launch("parents_from_links", p, next_token.device());
}

}  // namespace

TORCH_LIBRARY(treewy, m) {
  m.def(
      "tree_verify(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor state, "
      "Tensor state_indices, Tensor? parents, float scale, Tensor(a!) out, Tensor(b!) stash_u, Tensor(c!) stash_k, "
      "Tensor(d!) stash_k_rnorm, Tensor(e!) stash_g, Tensor(f!) errors) -> ()");
  m.def(
      "tree_conv_verify(Tensor mixed_qkv, Tensor conv_weight, Tensor? conv_bias, Tensor conv_state, Tensor a, "
      "Tensor b, Tensor A_log, Tensor dt_bias, Tensor state, Tensor state_indices, Tensor? parents, float scale, "
      "Tensor(a!) out, Tensor(b!) stash_u, Tensor(c!) stash_k, Tensor(d!) stash_k_rnorm, Tensor(e!) stash_g, "
      "Tensor(f!) stash_conv, Tensor(g!) errors) -> ()");
  m.def(
      "commit(Tensor stash_u, Tensor stash_k, Tensor stash_k_rnorm, Tensor stash_g, Tensor? stash_conv, "
      "Tensor? parents, Tensor accepted, Tensor state_indices, Tensor? track_indices, Tensor? track_nodes, "
      "Tensor(a!) state, Tensor(b!)? conv_state, Tensor(c!) errors) -> ()");
  m.def(
      "parents_from_links(Tensor next_token, Tensor next_sibling, Tensor(a!) parents, Tensor(b!)? ancestors, "
      "Tensor(c!) errors) -> ()");
  // Which instruction set the CPU kernels use here; for build_info() and tests.
  m.def("cpu_isa() -> str", []() { return std::string(cpu_isa()); });
}

TORCH_LIBRARY_IMPL(treewy, CPU, m) {
  m.impl("tree_verify", &tree_verify<Cpu>);
  m.impl("tree_conv_verify", &tree_conv_verify<Cpu>);
  m.impl("commit", &commit<Cpu>);
  m.impl("parents_from_links", &parents_from_links<Cpu>);
}

// Registered in a CPU-only build too: there it answers with a sentence instead of torch's "no kernel for backend".
TORCH_LIBRARY_IMPL(treewy, CUDA, m) {
  m.impl("tree_verify", &tree_verify<Cuda>);
  m.impl("tree_conv_verify", &tree_conv_verify<Cuda>);
  m.impl("commit", &commit<Cuda>);
  m.impl("parents_from_links", &parents_from_links<Cuda>);
}

}  // namespace treewy
