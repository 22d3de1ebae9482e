// The raw gates of GDN between a fused projection and what the chunk kernels take: columns a | b of a bf16 matrix, and two
// dense binary32 tensors.
//
//   matrix (rows, pitch) in bf16; a, b (rows, H) in binary32
//
// The way back also clears the columns that fill the matrix up to its width.
#include "layer.cuh"

struct Widen {
    bf16* matrix; // (rows, pitch), from the column of a on
    float* a;     // (rows, H)
    float* b;     // (rows, H)
    int rows;
    int heads;   // H
    int columns; // of the matrix from a on: 2 H, and what fills it up
    int pitch;
};

constexpr int THREADS = 256;

// Grid: rows * 2 H / THREADS rounded up.
extern "C" __global__ void __launch_bounds__(THREADS) widen(const __grid_constant__ Widen p) {
    const long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
    const int row = (int)(i / (2 * p.heads)), column = (int)(i % (2 * p.heads));
    wait_for_kernel_before();
    if (row >= p.rows) return;
    float* to = column < p.heads ? p.a + column : p.b + column - p.heads;
    to[(long long)row * p.heads] = to_float(p.matrix[(long long)row * p.pitch + column]);
}

// Grid: rows * columns / THREADS rounded up.
extern "C" __global__ void __launch_bounds__(THREADS) narrow(const __grid_constant__ Widen p) {
    const long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
    const int row = (int)(i / p.columns), column = (int)(i % p.columns);
    wait_for_kernel_before();
    if (row >= p.rows) return;
    float x = 0.0f;
    if (column < 2 * p.heads) {
        const float* from = column < p.heads ? p.a + column : p.b + column - p.heads;
        x = from[(long long)row * p.heads];
    }
    p.matrix[(long long)row * p.pitch + column] = from_float<bf16>(x);
}
