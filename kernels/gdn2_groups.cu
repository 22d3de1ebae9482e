// Where several value heads of GDN-2 share a q/k head: dq and dk are the sums of what gdn2_gradient.cu found for each of them,
// always in the same order.
//
//   d_queries, d_keys (T, HV, K)  ->  dq, dk (T, HK, K)
#include "chunk.cuh"

// Grid: T, HK; a thread each channel.
extern "C" __global__ void __launch_bounds__(KD) gdn2_groups(const __grid_constant__ ChunkParams p) {
    wait_for_kernel_before();
    const int group = p.value_heads / p.qk_heads;
    const long long token = blockIdx.x, head = blockIdx.y;
    const long long from = (token * p.value_heads + head * group) * KD + threadIdx.x;
    float dq = 0.0f, dk = 0.0f;
    for (int h = 0; h < group; ++h) {
        dq += p.channels.d_queries[from + h * KD];
        dk += p.channels.d_keys[from + h * KD];
    }
    const long long to = (token * p.qk_heads + head) * KD + threadIdx.x;
    p.dq[to] = from_float<INPUT>(dq);
    p.dk[to] = from_float<INPUT>(dk);
}
