// The functions of NCCL's that are noted, as nccl.h declares them; types and operations as numbers.
#pragma once

#include <cuda.h>

#include <cstddef>

extern "C" {

using ncclComm_t = struct ncclComm*;
using ncclResult_t = int;
struct ncclUniqueId {
  char internal[128];
};

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, int type, int op, ncclComm_t comm, CUstream stream);
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, int type, ncclComm_t comm, CUstream stream);
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, int type, int op, ncclComm_t comm, CUstream stream);
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, int type, int root, ncclComm_t comm, CUstream stream);
ncclResult_t ncclBcast(void* to, size_t count, int type, int root, ncclComm_t comm, CUstream stream);
ncclResult_t ncclReduce(const void* from, void* to, size_t count, int type, int op, int root, ncclComm_t comm, CUstream stream);
ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, int type, ncclComm_t comm, CUstream stream);
ncclResult_t ncclGather(const void* from, void* to, size_t count, int type, int root, ncclComm_t comm, CUstream stream);
ncclResult_t ncclScatter(const void* from, void* to, size_t count, int type, int root, ncclComm_t comm, CUstream stream);
ncclResult_t ncclSend(const void* from, size_t count, int type, int peer, ncclComm_t comm, CUstream stream);
ncclResult_t ncclRecv(void* to, size_t count, int type, int peer, ncclComm_t comm, CUstream stream);

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank);
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, void* config);
ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int ranks, int rank, int count, ncclUniqueId* ids, void* config);
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* out, void* config);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error);
ncclResult_t ncclCommAbort(ncclComm_t comm);

// Only called.
ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank);
ncclResult_t ncclCommCount(ncclComm_t comm, int* ranks);
}
