// A copy, to know what memory gives: every byte is read once and written once.
//
// Accesses have 16 bytes. The grid is as large as the GPU, and strides over the array; a thread issues the four reads of a
// round before it writes.

typedef unsigned long long u64;

constexpr int READS = 4;

struct Copy {
    const int4* from;
    int4* to;
    u64 count;  // accesses
};

extern "C" __global__ void __launch_bounds__(256) copy(const __grid_constant__ Copy p) {
    const u64 stride = (u64)gridDim.x * blockDim.x;
    u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (; at + (READS - 1) * stride < p.count; at += READS * stride) {
        int4 x[READS];
#pragma unroll
        for (int i = 0; i < READS; i++) x[i] = p.from[at + i * stride];
#pragma unroll
        for (int i = 0; i < READS; i++) p.to[at + i * stride] = x[i];
    }
    for (; at < p.count; at += stride) p.to[at] = p.from[at];
}
