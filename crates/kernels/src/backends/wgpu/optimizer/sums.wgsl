// Sums of values of several tensors, PIECE values of one per workgroup: a * b, a * a, or a.
struct P {
    sums_at: u32, b_at: u32, sign: f32,
#for t in TENSORS
    count_{t}: u32, at_{t}: u32,
#end
}
var<immediate> p: P;
#for t in TENSORS
@binding(_) var<storage, READ> a_{t}: array<f32>;
#end
#if PRODUCT
@binding(_) var<storage, READ> b: array<f32>;
#end
@binding(_) var<storage, read_write> sums: array<f32>;

const THREADS = 256u;
var<workgroup> parts: array<f32, THREADS>;

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let index = group.x + group.y * 65535u;
    var sum = 0.0;
    // Pieces of the tensors before.
    var before = 0u;
#for t in TENSORS
    {
        let pieces = max((p.count_{t} + {PIECE}u - 1u) / {PIECE}u, 1u);
        if (index >= before && index < before + pieces) {
            let first = (index - before) * {PIECE}u;
            let end = min(first + {PIECE}u, p.count_{t});
            for (var i = first + thread; i < end; i += THREADS) {
                let value = a_{t}[p.at_{t} + i];
#if PRODUCT
                sum += value * b[p.b_at + i];
#else
#if SQUARE
                sum += value * value;
#else
                sum += value;
#end
#end
            }
        }
        before += pieces;
    }
#end
    parts[thread] = sum;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if (thread < half) { parts[thread] += parts[thread + half]; }
        workgroupBarrier();
    }
    if (thread == 0u && index < before) { sums[p.sums_at + index] = p.sign * parts[0]; }
}
