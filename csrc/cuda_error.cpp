// The text of a CUDA error code, compiled by nvcc so that the file with torch headers needs no CUDA header.
#include <cuda_runtime_api.h>

#include <cstdio>

#define TREEWY_TEXT(...) #__VA_ARGS__
#define TREEWY_EXPANDED(...) TREEWY_TEXT(__VA_ARGS__)

namespace treewy {

const char* cuda_error_string(int code) {
  if (code != cudaErrorNoKernelImageForDevice && code != cudaErrorInvalidDeviceFunction) return cudaGetErrorString(static_cast<cudaError_t>(code));
  // The runtime does not say what was looked for, nor what there is.
  static thread_local char text[256];
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  std::snprintf(text, sizeof text, "no kernel for this GPU, compute capability %d.%d; this build holds %s (in tenths: 900 is 9.0); TORCH_CUDA_ARCH_LIST chooses",
                major, minor, TREEWY_EXPANDED(__CUDA_ARCH_LIST__));
  return text;
}

}  // namespace treewy
