// The exponential function of decays that are kept in binary32.
#pragma once

// e^x for the MODE of tile.cuh.
//
// expf ends with the instruction ex2.approx, whose errors have a direction: results of the fp32 kernels on an H200 were pushed
// outward by as much as decays push that are too large by 0.15 unit roundoffs. Where all else is rounded to nearest that
// shows, so the fp32 mode takes fused multiply-adds: with n = round(x / ln 2) and r = x - n ln 2, ln 2 in two words,
//
//     e^x = 2^n (1 + r + r^2 w(r)),      w of degree 5, minimax for |r| <= ln 2 / 2.
//
// Error at most 0.85 ulp, below 0.005 unit roundoffs on average. 2^n in two factors, the second of which rounds what is
// subnormal.
__device__ __forceinline__ float exponential_f32(float x) {
#if MODE == MODE_F32
    const float inside = x < -105.0f ? -105.0f : x > 89.0f ? 89.0f : x; // 0 and infinity beyond; NaN stays
    const float shifted = fmaf(inside, 1.44269504f, 12582912.0f), n = shifted - 12582912.0f; // 1.5 * 2^23: no fraction bits
    const float high = fmaf(n, -0.693147182f, inside), low = n * 1.90465430e-9f, r = high + low;
    float w = 1.97902933e-4f;
    w = fmaf(w, r, 1.39447034e-3f);
    w = fmaf(w, r, 8.33349768e-3f);
    w = fmaf(w, r, 4.16662954e-2f);
    w = fmaf(w, r, 1.66666657e-1f);
    w = fmaf(w, r, 0.5f);
    const float y = 1.0f + (high + fmaf(r * r, w, low));
    const int exponent = __float_as_int(shifted) - 0x4b400000, half = exponent >> 1;
    return y * __int_as_float((half + 127) << 23) * __int_as_float((exponent - half + 127) << 23);
#else
    return expf(x);
#endif
}
