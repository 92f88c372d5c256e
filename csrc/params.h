// Parameter structs shared by the CPU and CUDA implementations. No tensor library in here: plain pointers, shapes and
// strides, so that the kernels can be compiled, read and tested without torch.
//
// One letter per axis everywhere: N requests, T draft nodes a request, H key heads, HV value heads, K and V head
// dimensions, L layers, R stash rows (>= N), Tc node capacity of the stash (>= T), D = 2*H*K + HV*V conv channels,
// W convolution width. Strides are in elements of the tensor they belong to and always 64-bit. The last axis of every
// tensor is contiguous unless a stride for it is named here.
#pragma once

#include <cstdint>

namespace treewy {

constexpr int kMaxNodes = 128;     // T: four 32-bit words hold a node's ancestor set
constexpr int kMaxConvWidth = 4;   // W: what Qwen3-Next and Qwen3.5 use; a node keeps one column, not W-1

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Kinds of bad values found inside tensors; index into the int64 error counter (kErrorKinds entries). A row that hits
// one is skipped and counted once per call, however many heads or layers it has, under the first kind found in the order
// state index, accepted node, track, parent (any entry of the row), track node off the accepted path.
enum ErrorKind : int32_t {
  kErrorParent = 0,       // parents[n,t] is not in [-1, t-1], or parents[n,0] != -1
  kErrorStateIndex = 1,   // state index >= slots, or < -1
  kErrorAcceptedNode = 2, // accepted node >= T, or < -1
  kErrorTrack = 3,        // track node or track slot out of range
  kErrorLink = 4,         // first-child / next-sibling link out of range, not after the parent, or reaching a node twice
  kErrorKinds = 8,
};

// Integer tensors that callers own in either width: [N] contiguous.
struct IndexVector {
  const void* data = nullptr;  // null: absent
  bool is_int64 = false;
};

// The stash of one layer. Written by verify, read by commit. Row r belongs to row r of the batch.
struct StashLayer {
  float* u = nullptr;         // [R, HV, Tc, V] solution of the triangular solve, float32
  void* k = nullptr;          // [R, H, Tc, K] key before normalisation, activation dtype
  float* k_rnorm = nullptr;   // [R, H, Tc] 1 / sqrt(sum k^2 + 1e-6)
  float* g = nullptr;         // [R, HV, Tc] the node's own log decay g_t (<= 0); commit sums it along the path
  void* conv = nullptr;       // [R, Tc, D] raw convolution input of the node, activation dtype; null without conv
  int64_t u_stride_row = 0, u_stride_head = 0;              // node stride is V
  int64_t k_stride_row = 0, k_stride_head = 0;              // node stride is K
  int64_t k_rnorm_stride_row = 0, k_rnorm_stride_head = 0;  // node stride is 1
  int64_t g_stride_row = 0, g_stride_head = 0;              // node stride is 1
  int64_t conv_stride_row = 0, conv_stride_node = 0;
};

struct VerifyParams {
  int32_t N = 0, T = 0, H = 0, HV = 0, K = 0, V = 0;
  int64_t slots = 0;
  float scale = 0.f;                      // multiplies q after normalisation; K^-0.5
  DType act_dtype = DType::kBFloat16;     // q k v a b mixed_qkv conv_*, stash k and conv
  DType state_dtype = DType::kFloat32;
  DType out_dtype = DType::kBFloat16;     // act_dtype or float32
  DType A_log_dtype = DType::kFloat32, dt_bias_dtype = DType::kFloat32;

  // Plain form: q, k [N*T, H, K], v [N*T, HV, V]. All null in the fused-convolution form.
  const void *q = nullptr, *k = nullptr, *v = nullptr;
  int64_t q_stride_token = 0, q_stride_head = 0;
  int64_t k_stride_token = 0, k_stride_head = 0;
  int64_t v_stride_token = 0, v_stride_head = 0;

  // Fused-convolution form: mixed_qkv [N*T, D] (channels: q heads, k heads, v heads), weight [D, W], bias [D] or null,
  // conv state [slots, D, W-1] (last column: the most recent token). Convolution outputs are rounded to act_dtype after
  // SiLU, so that both forms see the same q, k, v. mixed_qkv null in the plain form.
  const void* mixed_qkv = nullptr;
  int64_t mixed_qkv_stride_token = 0;
  const void* conv_weight = nullptr;
  int64_t conv_weight_stride_channel = 0;
  const void* conv_bias = nullptr;
  const void* conv_state = nullptr;
  int64_t conv_state_stride_slot = 0, conv_state_stride_channel = 0, conv_state_stride_column = 0;
  int32_t W = 0;

  const void *a = nullptr, *b = nullptr;  // [N*T, HV]
  int64_t a_stride_token = 0, b_stride_token = 0;
  const void *A_log = nullptr, *dt_bias = nullptr;  // [HV]

  const void* state = nullptr;            // [slots, HV, V, K]; read only
  int64_t state_stride_slot = 0, state_stride_head = 0;  // row stride is K
  IndexVector state_indices;              // [N]; -1: padding row (outputs zero, nothing else written)
  const int32_t* parents = nullptr;       // [N, T], -1: child of the committed state; null: chain
  int64_t parents_stride_row = 0;

  void* out = nullptr;                    // [N*T, HV, V]
  int64_t out_stride_token = 0, out_stride_head = 0;
  StashLayer stash;
  int64_t* errors = nullptr;              // [kErrorKinds]
};

struct CommitParams {
  int32_t L = 0, N = 0, T = 0, H = 0, HV = 0, K = 0, V = 0, D = 0, W = 0;  // D, W: 0 without conv
  int64_t slots = 0;
  DType act_dtype = DType::kBFloat16, state_dtype = DType::kFloat32, conv_dtype = DType::kBFloat16;
  StashLayer stash;                       // layer 0
  int64_t u_stride_layer = 0, k_stride_layer = 0, k_rnorm_stride_layer = 0, g_stride_layer = 0, conv_stride_layer = 0;
  const int32_t* parents = nullptr;       // [N, T]; null: chain
  int64_t parents_stride_row = 0;
  IndexVector accepted;                   // [N] accepted node; -1: row commits nothing
  IndexVector state_indices;              // [N] slot read, and written with the state of the accepted node
  IndexVector track_indices;              // [N] or absent: slot that receives the state of the track node; -1: none
  IndexVector track_nodes;                // [N] or absent: an ancestor of the accepted node or itself; -1: none
  void* state = nullptr;                  // [L, slots, HV, V, K]
  int64_t state_stride_layer = 0, state_stride_slot = 0, state_stride_head = 0;  // row stride is K
  void* conv_state = nullptr;             // [L, slots, D, W-1] or null
  int64_t conv_state_stride_layer = 0, conv_state_stride_slot = 0, conv_state_stride_channel = 0,
          conv_state_stride_column = 0;
  int64_t* errors = nullptr;
};

struct LinksParams {
  int32_t N = 0, T = 0;
  const void *next_token = nullptr, *next_sibling = nullptr;  // [N, T] first child / next sibling; -1: none
  bool is_int64 = false;
  int64_t next_token_stride_row = 0, next_sibling_stride_row = 0;
  int32_t* parents = nullptr;             // [N, T]; nodes that no link reaches, and bad rows, get -1
  int64_t parents_stride_row = 0;
  int32_t* ancestors = nullptr;           // [N, T, ceil(T/32)] bit j of word j/32: node j is t or an ancestor of t; or null
  int64_t* errors = nullptr;
};

// Launchers: 0 on success, else an error code of the device runtime (CUDA: cudaError_t). `stream` is a cudaStream_t.
int launch_verify_cpu(const VerifyParams& p);
int launch_commit_cpu(const CommitParams& p);
int launch_links_cpu(const LinksParams& p);
int launch_verify_cuda(const VerifyParams& p, void* stream);
int launch_commit_cuda(const CommitParams& p, void* stream);
int launch_links_cuda(const LinksParams& p, void* stream);

}  // namespace treewy
