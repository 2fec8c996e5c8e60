// The functions of the CUDA runtime and driver that have to answer torch; check.py adds the others, which return 0.
#include <cuda_runtime_api.h>
#include <stdlib.h>

cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }

cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  *properties = (struct cudaDeviceProp){.name = "pretended GPU", .major = 9, .warpSize = 32, .multiProcessorCount = 132};
  return cudaSuccess;
}

// torch requires an address of memory that fake tensors never use
cudaError_t cudaMalloc(void **memory, size_t bytes) { *memory = malloc(bytes); return cudaSuccess; }

const char *cudaGetErrorString(cudaError_t error) { return "the pretended GPU failed"; }

const char *cudaGetErrorName(cudaError_t error) { return "pretended"; }

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *active = 1; return 0; }
