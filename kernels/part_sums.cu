// The second pass of a sum over tokens: parts (count, columns) -> sums (columns), added up in a fixed order.
//
// A block takes 32 columns. Warp w adds the parts w, w + 8, ..., and the sums of the warps are added in their order.
#include "common.cuh"

struct PartSums {
    const float* parts; // (count, columns)
    float* sums;        // (columns)
    int count;
    int columns;
};

constexpr int WARPS = 8;

// Grid: columns / 32 rounded up.
extern "C" __global__ void __launch_bounds__(32 * WARPS) part_sums(const __grid_constant__ PartSums p) {
    __shared__ float shared[WARPS][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = blockIdx.x * 32 + lane;
    wait_for_kernel_before();
    float sum = 0.0f;
    if (column < p.columns)
#pragma unroll 8
        for (int part = warp; part < p.count; part += WARPS) sum += p.parts[(long long)part * p.columns + column];
    shared[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || column >= p.columns) return;
    sum = 0.0f;
    for (int w = 0; w < WARPS; ++w) sum += shared[w][lane];
    p.sums[column] = sum;
}
