// Sums of values, PIECE of them per workgroup: a * b, a * a, or a.
struct P { count: u32, a_at: u32, b_at: u32, sums_at: u32, sign: f32 }
var<immediate> p: P;
@binding(_) var<storage, READ> a: array<f32>;
#if PRODUCT
@binding(_) var<storage, READ> b: array<f32>;
#end
@binding(_) var<storage, read_write> sums: array<f32>;

const THREADS = 256u;
var<workgroup> parts: array<f32, THREADS>;

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let piece = group.x + group.y * 65535u;
    let end = min((piece + 1u) * {PIECE}u, p.count);
    var sum = 0.0;
    for (var i = piece * {PIECE}u + thread; i < end; i += THREADS) {
        let value = a[p.a_at + i];
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
    parts[thread] = sum;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if (thread < half) { parts[thread] += parts[thread + half]; }
        workgroupBarrier();
    }
    if (thread == 0u && piece * {PIECE}u < max(p.count, 1u)) { sums[p.sums_at + piece] = p.sign * parts[0]; }
}
