// The text of a CUDA error code, compiled by nvcc so that the file with torch headers needs no CUDA header.
#include <cuda_runtime_api.h>

namespace treewy {

const char* cuda_error_string(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

}  // namespace treewy
