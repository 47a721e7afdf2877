// A CUDA runtime for a host without a GPU. It answers PyTorch's questions about the
// device from the target description (device.h, generated), hands out small pieces of
// host memory so that PyTorch can initialise, and refuses to do work: a kernel launch
// fails with an error that says so.
//
// Preloaded before libcudart, for the compiler's worker process only. The layout of
// cudaDeviceProp changed with CUDA 13, so the headers must be those of the CUDA major
// that PyTorch links.
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"

_Static_assert(CUDART_VERSION / 1000 == CK_CUDA_MAJOR,
               "headers of another CUDA major than PyTorch's");

#define API __attribute__((visibility("default")))

enum { SMALL_ALLOCATION_BYTES = 64 << 20 };

// What the last refused call left. A launch written <<<>>> drops its own error, and
// PyTorch asks for it afterwards.
static __thread cudaError_t last_error = cudaSuccess;

static void fill(struct cudaDeviceProp *p) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, CK_NAME);
  p->major = CK_MAJOR;
  p->minor = CK_MINOR;
  p->multiProcessorCount = CK_MULTI_PROCESSOR_COUNT;
  p->totalGlobalMem = CK_TOTAL_MEMORY;
  p->regsPerBlock = CK_REGS_PER_MULTIPROCESSOR;
  p->regsPerMultiprocessor = CK_REGS_PER_MULTIPROCESSOR;
  p->maxThreadsPerMultiProcessor = CK_MAX_THREADS_PER_MULTI_PROCESSOR;
  p->maxThreadsPerBlock = CK_MAX_THREADS_PER_BLOCK;
  p->warpSize = CK_WARP_SIZE;
  p->sharedMemPerBlock = CK_SHARED_MEMORY_PER_BLOCK;
  p->sharedMemPerBlockOptin = CK_SHARED_MEMORY_PER_BLOCK_OPTIN;
  p->sharedMemPerMultiprocessor = CK_SHARED_MEMORY_PER_MULTIPROCESSOR;
  p->l2CacheSize = CK_L2_CACHE_SIZE;
  p->memoryBusWidth = CK_MEMORY_BUS_WIDTH;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->unifiedAddressing = 1;
  p->concurrentKernels = 1;
}

API cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
API cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
API cudaError_t cudaSetDevice(int device) { return device ? cudaErrorInvalidDevice : cudaSuccess; }
API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  fill(p);
  return device ? cudaErrorInvalidDevice : cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
API cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
API cudaError_t cudaPeekAtLastError(void) { return last_error; }
API cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                         unsigned long long *id, cudaGraph_t *graph,
                                         const cudaGraphNode_t **nodes,
                                         const struct cudaGraphEdgeData_st **edges, size_t *count) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = CK_MULTI_PROCESSOR_COUNT; break;
    case cudaDevAttrComputeCapabilityMajor: *value = CK_MAJOR; break;
    case cudaDevAttrComputeCapabilityMinor: *value = CK_MINOR; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = CK_SHARED_MEMORY_PER_BLOCK_OPTIN; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
API cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
  *available = *total = CK_TOTAL_MEMORY;
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return cudaSuccess; }

// Weights are never here: only scalars and small constants are allocated.
API cudaError_t cudaMalloc(void **pointer, size_t size) {
  if (size > SMALL_ALLOCATION_BYTES) return cudaErrorMemoryAllocation;
  *pointer = aligned_alloc(512, (size + 511) / 512 * 512);
  return *pointer ? cudaSuccess : cudaErrorMemoryAllocation;
}
API cudaError_t cudaFree(void *pointer) { free(pointer); return cudaSuccess; }
API cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
  *pointer = malloc(size);
  return *pointer ? cudaSuccess : cudaErrorMemoryAllocation;
}
API cudaError_t cudaFreeHost(void *pointer) { free(pointer); return cudaSuccess; }
API cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  memcpy(to, from, size);
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind,
                                cudaStream_t stream) {
  memcpy(to, from, size);
  return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) {
  memset(to, value, size);
  return cudaSuccess;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  *event = (cudaEvent_t)malloc(8);
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaSuccess; }
API cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
API cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaSuccess; }
API cudaError_t cudaEventSynchronize(cudaEvent_t event) { return cudaSuccess; }
API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
  memset(attributes, 0, sizeof *attributes);
  attributes->type = cudaMemoryTypeUnregistered;
  return cudaSuccess;
}

// Work. A launch that seemed to succeed would give random numbers without a sign.
API cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                                 size_t shared, cudaStream_t stream) {
  return last_error = cudaErrorNotSupported;
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function,
                                    void **arguments) {
  return last_error = cudaErrorNotSupported;
}
