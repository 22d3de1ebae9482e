// Rotary position embedding in place, on the first heads of each row of a matrix: those of q and of k in q | k | v.
//
//   y_i = x_i cos - x_{i + d/2} sin      y_{i + d/2} = x_{i + d/2} cos + x_i sin      i < d/2, angle = t base^(-2 i / d)
//
//   x (rows, pitch) in bf16, of which the first HEADS d columns are turned; cosines, sines (T, d/2) in binary32
//
// Row n is token n mod T. The backward turns the gradient back: direction -1. A thread takes eight neighbouring channels of
// the first half and those that they are paired with.
#include "layer.cuh"

struct Rope {
    bf16* x;              // (rows, pitch)
    const float* cosines; // (T, d/2)
    const float* sines;   // (T, d/2)
    u32 count;            // threads with work: rows HEADS d / 16
    u32 per_row;          // of them in a row: HEADS d / 16
    u32 per_head;         // of them in a head: d / 16
    u32 pitch;            // elements from a row to the next
    u32 tokens;           // T
    float direction;      // 1 or -1
};

constexpr int THREADS = 256;

// Grid: count / THREADS rounded up.
extern "C" __global__ void __launch_bounds__(THREADS) rope(const __grid_constant__ Rope p) {
    const u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= p.count) return;
    const u32 row = i / p.per_row, in_row = i - row * p.per_row;
    const u32 head = in_row / p.per_head, channel = WIDE * (in_row - head * p.per_head), half = WIDE * p.per_head;
    bf16* at = p.x + (u64)row * p.pitch + 2 * half * head + channel;
    const u64 angle = (u64)(row % p.tokens) * half + channel;
    float cosine[WIDE], sine[WIDE], first[WIDE], second[WIDE];
    load_eight(p.cosines + angle, cosine);
    load_eight(p.sines + angle, sine);
    wait_for_kernel_before();
    load_eight(at, first);
    load_eight(at + half, second);
#pragma unroll
    for (int e = 0; e < WIDE; ++e) {
        const float x = first[e], y = second[e], s = p.direction * sine[e];
        first[e] = x * cosine[e] - y * s;
        second[e] = y * cosine[e] + x * s;
    }
    store_eight(at, first);
    store_eight(at + half, second);
}
