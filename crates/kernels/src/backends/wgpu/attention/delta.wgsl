// delta = sum over a head of d_o * o, for each query; a thread per query and head. [heads, tokens].
struct P { tokens: u32, heads: u32, width: u32, o_row: u32, o_at: u32, d_row: u32, d_at: u32 }
var<immediate> p: P;
@binding(_) var<storage, READ> o: array<f32>;
@binding(_) var<storage, READ> d_o: array<f32>;
@binding(_) var<storage, read_write> deltas: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let index = (group.x + group.y * 65535u) * 64u + thread;
    if (index >= p.tokens * p.heads) { return; }
    let token = index / p.heads;
    let head = index % p.heads;
    var sum = 0.0;
    for (var i = 0u; i < p.width; i++) {
        sum += o[p.o_at + token * p.o_row + head * p.width + i] * d_o[p.d_at + token * p.d_row + head * p.width + i];
    }
    deltas[head * p.tokens + token] = sum;
}
