// parents_from_links: first-child / next-sibling links to parents and ancestor bit sets. One block per request.
#include "common.cuh"

namespace treewy {
namespace cuda {
namespace {

__device__ __forceinline__ int64_t load_link(const void* base, int64_t i, bool is_int64) {
  return is_int64 ? static_cast<const int64_t*>(base)[i] : static_cast<int64_t>(static_cast<const int32_t*>(base)[i]);
}

__global__ void __launch_bounds__(kMaxNodes) links_kernel(const __grid_constant__ LinksParams p) {
  __shared__ int parent[kMaxNodes];
  __shared__ int claimed[kMaxNodes];
  __shared__ int sibling[kMaxNodes];
  __shared__ uint32_t bits[2][kMaxNodes][kMaxWords];
  __shared__ int jump[2][kMaxNodes];
  const int n = blockIdx.x, t = threadIdx.x, T = p.T;

  int bad = 0;
  int64_t child = -1;
  if (t < T) {
    parent[t] = -1;
    claimed[t] = 0;
    child = load_link(p.next_token, n * p.next_token_stride_row + t, p.is_int64);
    int64_t s = load_link(p.next_sibling, n * p.next_sibling_stride_row + t, p.is_int64);
    if (child < -1 || child >= T || s < -1 || s >= T) bad = 1;
    sibling[t] = bad ? -1 : static_cast<int>(s);
    if (bad) child = -1;
  }
  __syncthreads();
  // Every visit claims its node, so that a cycle or a node with two parents ends the walk.
  while (child >= 0) {
    int c = static_cast<int>(child);
    if (c <= t || atomicExch(&claimed[c], 1) != 0) {
      bad = 1;
      break;
    }
    parent[c] = t;
    child = sibling[c];
  }
  bad = __syncthreads_or(bad);
  if (bad) {
    if (t == 0) count_error(p.errors, kErrorLink);
    if (t < T) parent[t] = -1;
  }
  const int words = (T + 31) / 32;
  if (t < T) {
    jump[0][t] = parent[t];
    for (int w = 0; w < kMaxWords; ++w) bits[0][t][w] = (t >> 5) == w ? 1u << (t & 31) : 0u;
    p.parents[n * p.parents_stride_row + t] = parent[t];
  }
  if (p.ancestors == nullptr) return;
  __syncthreads();
  int cur = 0;
  for (int reach = 1; reach < T; reach *= 2) {
    if (t < T) {
      int j = jump[cur][t];
      for (int w = 0; w < kMaxWords; ++w) bits[cur ^ 1][t][w] = bits[cur][t][w] | (j >= 0 ? bits[cur][j][w] : 0u);
      jump[cur ^ 1][t] = j >= 0 ? jump[cur][j] : -1;
    }
    cur ^= 1;
    __syncthreads();
  }
  if (t < T) {
    for (int w = 0; w < words; ++w)
      p.ancestors[(static_cast<int64_t>(n) * T + t) * words + w] = static_cast<int32_t>(bits[cur][t][w]);
  }
}

}  // namespace
}  // namespace cuda

int launch_links_cuda(const LinksParams& p, void* stream) {
  if (p.N == 0 || p.T == 0) return cudaSuccess;
  if (p.T > kMaxNodes) return cudaErrorInvalidValue;
  cuda::links_kernel<<<p.N, (p.T + 31) / 32 * 32, 0, static_cast<cudaStream_t>(stream)>>>(p);
  return cudaGetLastError();
}

}  // namespace treewy
