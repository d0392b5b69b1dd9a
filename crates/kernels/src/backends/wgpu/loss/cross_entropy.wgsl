// Loss of rows of logits against their targets; the gradient replaces the logits. One workgroup per row.
struct P { rows: u32, width: u32, first: u32, targets_at: u32, weights_at: u32, scale: f32, cap: f32, gradient: f32 }
var<immediate> p: P;
@binding(_) var<storage, READ> targets: array<i32>;
#if WEIGHTS
@binding(_) var<storage, READ> weights: array<f32>;
#end
@binding(_) var<storage, read_write> logits: array<f32>;
@binding(_) var<storage, read_write> log_probs: array<f32>;
@binding(_) var<storage, read_write> correct: array<f32>;

const THREADS = 256u;
var<workgroup> parts: array<f32, THREADS>;

fn logit(i: u32) -> f32 {
    let value = logits[i] * p.scale;
#if CAP
    return p.cap * tanh(clamp(value / p.cap, -15.0, 15.0));
#else
    return value;
#end
}

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let row = group.x + group.y * 65535u;
    if (row >= p.rows) { return; }
    let at = row * p.width;
    let goal = u32(targets[p.targets_at + p.first + row]);
    var most = -3.4e38;
    for (var i = thread; i < p.width; i += THREADS) { most = max(most, logit(at + i)); }
    parts[thread] = most;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if (thread < half) { parts[thread] = max(parts[thread], parts[thread + half]); }
        workgroupBarrier();
    }
    most = parts[0];
    workgroupBarrier();
    var sum = 0.0;
    for (var i = thread; i < p.width; i += THREADS) { sum += exp(logit(at + i) - most); }
    parts[thread] = sum;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if (thread < half) { parts[thread] += parts[thread + half]; }
        workgroupBarrier();
    }
    sum = parts[0];
    let of_target = logit(at + goal);
    workgroupBarrier();
    if (thread == 0u) {
        log_probs[p.first + row] = of_target - most - log(sum);
        correct[p.first + row] = select(0.0, 1.0, of_target >= most);
    }
#if GRADIENT
    var factor = p.gradient;
#if WEIGHTS
    factor *= weights[p.weights_at + p.first + row];
#end
    for (var i = thread; i < p.width; i += THREADS) {
        let value = logit(at + i);
        var d = exp(value - most) / sum;
        if (i == goal) { d -= 1.0; }
#if CAP
        let bent = value / p.cap;
        d *= 1.0 - bent * bent;
#end
        logits[at + i] = d * factor;
    }
#end
}
