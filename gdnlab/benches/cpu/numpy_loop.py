"""The gated delta rule of one head, token by token in numpy: the peer of the float64 reference.

Reads q, k [T, K], v [T, V], g, beta [T] and do [T, V] as raw float64 from standard input, runs the forward and the
backward of the reference (which keeps a state every SEGMENT tokens and recomputes the others), and prints one line of
JSON: the seconds of every run, and the sum of magnitudes of each result, so that the caller sees that it did the same.

    numpy_loop.py TOKENS KEY_DIM VALUE_DIM RUNS < inputs
"""

import json
import sys
import time

import numpy as np

SEGMENT = 64


def forward(q, k, v, g, beta, state, scale):
    """`S <- e^g S; u = beta (v - S^T k); S <- S + k u^T; o = s S^T q`, and the state before each segment."""
    state = state.copy()
    o = np.empty_like(v)
    kept = []
    for t in range(len(q)):
        if t % SEGMENT == 0:
            kept.append(state.copy())
        state *= np.exp(g[t])
        u = beta[t] * (v[t] - k[t] @ state)
        state += np.outer(k[t], u)
        o[t] = scale * (q[t] @ state)
    return o, kept


def recompute(k, v, g, beta, state):
    """The decayed states of a segment and what was written to each."""
    decayed = np.empty((len(k), *state.shape))
    u = np.empty_like(v)
    for t in range(len(k)):
        np.multiply(state, np.exp(g[t]), out=decayed[t])
        u[t] = beta[t] * (v[t] - k[t] @ decayed[t])
        state = decayed[t] + np.outer(k[t], u[t])
    return decayed, u


def backward(q, k, v, g, beta, do, kept, scale):
    """The adjoint of `forward`, segment by segment from the last one on."""
    dq, dk, dv = np.empty_like(q), np.empty_like(k), np.empty_like(v)
    dg, dbeta = np.empty_like(g), np.empty_like(beta)
    d_state = np.zeros_like(kept[0])
    for n in reversed(range(len(kept))):
        first, last = n * SEGMENT, min((n + 1) * SEGMENT, len(q))
        part = slice(first, last)
        decayed, u = recompute(k[part], v[part], g[part], beta[part], kept[n])
        for t in reversed(range(first, last)):
            before, written = decayed[t - first], u[t - first]
            d_state += np.outer(scale * q[t], do[t])
            dq[t] = scale * (before @ do[t] + k[t] * (written @ do[t]))
            du = k[t] @ d_state
            de = -(before @ du)
            dk[t] = d_state @ written + beta[t] * de
            d_state -= np.outer(beta[t] * k[t], du)
            dg[t] = np.vdot(before, d_state)
            d_state *= np.exp(g[t])
            dv[t] = beta[t] * du
            dbeta[t] = v[t] @ du + k[t] @ de
    return dq, dk, dv, dg, dbeta


def main():
    tokens, key_dim, value_dim, runs = map(int, sys.argv[1:])
    shapes = [(tokens, key_dim), (tokens, key_dim), (tokens, value_dim), (tokens,), (tokens,), (tokens, value_dim)]
    data = np.frombuffer(sys.stdin.buffer.read())
    ends = np.cumsum([np.prod(shape) for shape in shapes])
    q, k, v, g, beta, do = (part.reshape(shape) for part, shape in zip(np.split(data, ends[:-1]), shapes))
    state, scale = np.zeros((key_dim, value_dim)), key_dim**-0.5
    forward_s, both_s = [], []
    for _ in range(runs):
        start = time.perf_counter()
        o, kept = forward(q, k, v, g, beta, state, scale)
        forward_s.append(time.perf_counter() - start)
        grads = backward(q, k, v, g, beta, do, kept, scale)
        both_s.append(time.perf_counter() - start)
    results = dict(zip(["o", "dq", "dk", "dv", "dg", "dbeta"], [o, *grads]))
    magnitudes = {name: float(np.abs(result).sum()) for name, result in results.items()}
    print(json.dumps({"numpy": np.__version__, "forward_s": forward_s, "both_s": both_s, "magnitudes": magnitudes}))


main()
