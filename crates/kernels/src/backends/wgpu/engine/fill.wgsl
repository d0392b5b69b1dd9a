// Fills memory with a word, or copies words (COPY).
struct P { count: u32, word: u32 }
var<immediate> p: P;
#if COPY
@binding(_) var<storage, READ> x: array<u32>;
#end
@binding(_) var<storage, read_write> y: array<u32>;

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let i = (group.x + group.y * 65535u) * 256u + thread;
    if (i >= p.count) { return; }
#if COPY
    y[i] = x[p.word + i];
#else
    y[i] = p.word;
#end
}
