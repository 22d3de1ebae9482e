"""Peers for tests that need nothing but the standard library: the recurrence on nested lists, and what peers do wrong."""

import math
import os
import sys
import time


def product(matrix, vector):
    """`M x` for a list of rows."""
    return [sum(x * y for x, y in zip(row, vector)) for row in matrix]


def transposed(matrix, vector):
    """`M^T x`."""
    return [sum(row[j] * x for row, x in zip(matrix, vector)) for j in range(len(matrix[0]))]


def plus(matrix, factor, column, row):
    """`M + factor column row^T`."""
    return [[x + factor * c * r for x, r in zip(line, row)] for line, c in zip(matrix, column)]


class Head:
    """One sequence and one value head."""

    def __init__(self, q, k, v, g, beta, scale, state):
        self.q, self.k, self.v, self.g, self.beta, self.scale, self.start = q, k, v, g, beta, scale, state

    def forward(self):
        state, self.steps, o = self.start, [], []
        for q, k, v, g, beta in zip(self.q, self.k, self.v, self.g, self.beta):
            decayed = [[math.exp(g) * x for x in row] for row in state]
            e = [x - old for x, old in zip(v, transposed(decayed, k))]
            state = plus(decayed, beta, k, e)
            self.steps.append((decayed, e, state))
            o.append([self.scale * x for x in transposed(state, q)])
        return o, state

    def backward(self, do, d_state):
        """Gradients of q, k, v, g and beta token by token, and of the state before."""
        grads = []
        for t in reversed(range(len(self.q))):
            q, k, g, beta = self.q[t], self.k[t], self.g[t], self.beta[t]
            decayed, e, state = self.steps[t]
            d_state = plus(d_state, self.scale, q, do[t])
            dq = [self.scale * x for x in product(state, do[t])]
            du = transposed(d_state, k)
            de = [beta * x for x in du]
            dk = [beta * x - y for x, y in zip(product(d_state, e), product(decayed, de))]
            d_state = plus(d_state, -1.0, k, de)
            dg = sum(x * y for a, b in zip(d_state, decayed) for x, y in zip(a, b))
            grads.append((dq, dk, de, dg, sum(x * y for x, y in zip(du, e))))
            d_state = [[math.exp(g) * x for x in row] for row in d_state]
        return grads[::-1], d_state


def gdn(q, k, v, g, beta, *, scale, initial_state=None, do=None, dht=None):
    """GDN for B sequences: output and final state, and the gradients where `do` is given."""
    batch, length, qk_heads, key_dim = q.shape
    heads, value_dim = v.shape[2:]
    zeros = lambda *dims: [zeros(*dims[1:]) for _ in range(dims[0])] if dims else 0.0
    nested = lambda x, *dims: zeros(*dims) if x is None else x.tolist()
    tensors = [x.tolist() for x in (q, k, v, g, beta)]
    start, dht = (nested(x, batch, heads, key_dim, value_dim) for x in (initial_state, dht))
    names = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dh0")
    found = {name: [] for name in names}
    do = None if do is None else do.tolist()
    for b in range(batch):
        dq, dk = zeros(length, qk_heads, key_dim), zeros(length, qk_heads, key_dim)
        of_heads = []
        for h in range(heads):
            group = h * qk_heads // heads
            column = lambda x, head: [row[head] for row in x[b]]
            parts = [column(x, group if index < 2 else h) for index, x in enumerate(tensors)]
            head = Head(*parts, scale, start[b][h])
            o, state = head.forward()
            grads, dh0 = ([], None) if do is None else head.backward(column(do, h), dht[b][h])
            for t, (q_grad, k_grad, *_) in enumerate(grads):
                dq[t][group] = [x + y for x, y in zip(dq[t][group], q_grad)]
                dk[t][group] = [x + y for x, y in zip(dk[t][group], k_grad)]
            of_heads.append((o, state, grads, dh0))
        by_token = lambda of: [[of(head, t) for head in of_heads] for t in range(length)]
        found["o"].append(by_token(lambda head, t: head[0][t]))
        found["final_state"].append([head[1] for head in of_heads])
        if do is not None:
            found["dq"].append(dq)
            found["dk"].append(dk)
            for name, index in (("dv", 2), ("dg", 3), ("dbeta", 4)):
                found[name].append(by_token(lambda head, t: head[2][t][index]))
            found["dh0"].append([head[3] for head in of_heads])
    return {name: value for name, value in found.items() if value}


def raises(q, k, v, g, beta, **keywords):
    raise ValueError("no luck")


def like_fla_on_hopper(q, k, v, g, beta, **keywords):
    raise RuntimeError("Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs gives wrong results for chunk_bwd_dqkwg (see #640)")


def raises_at_length(q, k, v, g, beta, **keywords):
    """As PyTorch words an error of the GPU."""
    raise RuntimeError(
        "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at some other API call\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA`\n\n1\n2\n3\n"
    )


def needs_another_module(q, k, v, g, beta, **keywords):
    import gdnlab_no_such_module


def exits(q, k, v, g, beta, **keywords):
    print("good-bye", file=sys.stderr, flush=True)
    os._exit(3)


def hangs(q, k, v, g, beta, **keywords):
    time.sleep(600)


def without_backward(q, k, v, g, beta, *, scale, initial_state, do=None, dht=None):
    if do is not None:
        raise ValueError("no backward here")
    return gdn(q, k, v, g, beta, scale=scale, initial_state=initial_state)


def hangs_for_once(q, k, v, g, beta, *, scale, initial_state):
    marker = __file__ + ".hung"
    if not os.path.exists(marker):
        open(marker, "w").close()
        time.sleep(600)
    os.remove(marker)
    return gdn(q, k, v, g, beta, scale=scale, initial_state=initial_state)


def dies_once(q, k, v, g, beta, **keywords):
    marker = __file__ + ".died"
    if not os.path.exists(marker):
        open(marker, "w").close()
        os._exit(1)
    print("what a peer prints is no answer")
    return gdn(q, k, v, g, beta, **{name: value for name, value in keywords.items() if name in ("scale", "initial_state")})


def no_state(q, k, v, g, beta, *, scale, initial_state):
    return gdn(q, k, v, g, beta, scale=scale, initial_state=initial_state)["o"]


def wrong_shape(q, k, v, g, beta, *, scale, initial_state):
    results = gdn(q, k, v, g, beta, scale=scale, initial_state=initial_state)
    return results["o"][0], results["final_state"]


def stateless(q, k, v, g, beta, *, scale):
    return gdn(q, k, v, g, beta, scale=scale)


def gives_nan(q, k, v, g, beta, *, scale, initial_state):
    results = gdn(q, k, v, g, beta, scale=scale, initial_state=initial_state)
    results["o"][0][0][0][0] = math.nan
    return results
