//! The k-quants of GGUF: super-blocks of 256 values in which sub-blocks have small scales of their own.
//!
//! ```text
//! q4_k   8 sub-blocks of 32: value = d * scale * code - dmin * minimum    codes 0..=15, scales and minima of 6 bits
//! q5_k   the same with codes 0..=31
//! q6_k   16 sub-blocks of 16: value = d * scale * code                    codes -32..=31, scales of 8 signed bits
//! ```
//! d and dmin are f16. A sub-block first gets the scale and minimum of least error over a range of roundings (least squares of the values over the
//! codes), then d and dmin are chosen, and scale and minimum again among the integers next to the best.
//! Trade-off: the errors count equally; no importance of inputs is measured. The search takes about a microsecond per 32 values.

use half::f16;

pub(super) const SUPER: usize = 256;
/// Values of a sub-block of `q4_k` and `q5_k`.
const SUB: usize = 32;
/// Values of a sub-block of `q6_k`.
const SUB_6: usize = 16;
/// Largest scale or minimum of 6 bits.
const TOP_SCALE: f32 = 63.0;

/// A super-block of `q4_k` or `q5_k`, unpacked.
struct WithMinima {
    d: f16,
    dmin: f16,
    scales: [u8; SUPER / SUB],
    minima: [u8; SUPER / SUB],
    codes: [u8; SUPER],
}

/// Encodes 256 values in 144 bytes.
pub(super) fn q4_k(values: &[f32]) -> [u8; 144] {
    let block = WithMinima::of(values, 15.0);
    let mut bytes = [0; 144];
    bytes[..16].copy_from_slice(&block.head());
    for (bytes, codes) in bytes[16..].chunks_mut(SUB).zip(block.codes.chunks(2 * SUB)) {
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = codes[at] | codes[at + SUB] << 4;
        }
    }
    bytes
}

/// Encodes 256 values in 176 bytes.
pub(super) fn q5_k(values: &[f32]) -> [u8; 176] {
    let block = WithMinima::of(values, 31.0);
    let mut bytes = [0; 176];
    bytes[..16].copy_from_slice(&block.head());
    let (high, low) = bytes[16..].split_at_mut(SUB);
    for (pair, (low, codes)) in low.chunks_mut(SUB).zip(block.codes.chunks(2 * SUB)).enumerate() {
        for at in 0..SUB {
            let (first, second) = (codes[at], codes[at + SUB]);
            low[at] = first & 15 | (second & 15) << 4;
            high[at] |= (first >> 4 | second >> 4 << 1) << (2 * pair);
        }
    }
    bytes
}

/// Encodes 256 values in 210 bytes.
pub(super) fn q6_k(values: &[f32]) -> [u8; 210] {
    let fits: Vec<f32> = values.chunks(SUB_6).map(fit_scale).collect();
    let d = f16::from_f32(largest_of(&fits) / -128.0);
    let mut bytes = [0; 210];
    let (codes, scales) = bytes.split_at_mut(192);
    let mut all = [0_u8; SUPER];
    for (sub, (values, fit)) in values.chunks(SUB_6).zip(fits).enumerate() {
        let scale =
            best_integer(fit / d.to_f32(), -128.0, 127.0, |scale| signed_codes_of(values, scale * d.to_f32()).1);
        scales[sub] = scale as i8 as u8;
        for (to, code) in all[sub * SUB_6..].iter_mut().zip(signed_codes_of(values, scale * d.to_f32()).0) {
            *to = (code + 32.0) as u8;
        }
    }
    scales[16..].copy_from_slice(&d.to_le_bytes());
    let (low, high) = codes.split_at_mut(SUPER / 2);
    for (half, codes) in all.chunks(SUPER / 2).enumerate() {
        let (low, high) = (&mut low[half * 64..][..64], &mut high[half * 32..][..32]);
        for at in 0..32 {
            let [a, b, c, d] = [codes[at], codes[at + 32], codes[at + 64], codes[at + 96]];
            low[at] = a & 15 | (c & 15) << 4;
            low[at + 32] = b & 15 | (d & 15) << 4;
            high[at] = a >> 4 | b >> 4 << 2 | c >> 4 << 4 | d >> 4 << 6;
        }
    }
    bytes
}

impl WithMinima {
    /// Quantizes 256 values to codes of `0..=top`.
    fn of(values: &[f32], top: f32) -> Self {
        let fits: Vec<(f32, f32)> = values.chunks(SUB).map(|values| fit_scale_and_minimum(values, top)).collect();
        let largest = |of: fn(&(f32, f32)) -> f32| fits.iter().map(of).fold(0.0_f32, f32::max);
        let d = f16::from_f32(largest(|fit| fit.0) / TOP_SCALE);
        let dmin = f16::from_f32(largest(|fit| fit.1) / TOP_SCALE);
        let mut block = Self { d, dmin, scales: [0; 8], minima: [0; 8], codes: [0; SUPER] };
        let [d, dmin] = [d, dmin].map(f16::to_f32);
        for (sub, (values, (scale, minimum))) in values.chunks(SUB).zip(fits).enumerate() {
            let error = |scale: f32, minimum: f32| codes_of(values, scale * d, minimum * dmin, top).1;
            // The least error of a scale is that with its best minimum.
            let minimum_for =
                |scale: f32| best_integer(minimum / dmin, 0.0, TOP_SCALE, |minimum| error(scale, minimum));
            let scale = best_integer(scale / d, 0.0, TOP_SCALE, |scale| error(scale, minimum_for(scale)));
            let minimum = minimum_for(scale);
            block.scales[sub] = scale as u8;
            block.minima[sub] = minimum as u8;
            for (to, code) in
                block.codes[sub * SUB..].iter_mut().zip(codes_of(values, scale * d, minimum * dmin, top).0)
            {
                *to = code as u8;
            }
        }
        block
    }

    /// Returns d, dmin, and scales and minima in 12 bytes: the first four of each in the low 6 bits of a byte, the low halves of the last four
    /// together in a byte, and their high 2 bits above the first four.
    fn head(&self) -> [u8; 16] {
        let mut head = [0; 16];
        head[..2].copy_from_slice(&self.d.to_le_bytes());
        head[2..4].copy_from_slice(&self.dmin.to_le_bytes());
        for at in 0..4 {
            let [(scale, minimum), (late_scale, late_minimum)] =
                [at, at + 4].map(|at| (self.scales[at], self.minima[at]));
            head[4 + at] = scale | late_scale >> 4 << 6;
            head[8 + at] = minimum | late_minimum >> 4 << 6;
            head[12 + at] = late_scale & 15 | late_minimum << 4;
        }
        head
    }
}

/// Returns the value of largest magnitude, the first of several.
pub(super) fn largest_of(values: &[f32]) -> f32 {
    values.iter().fold(0.0_f32, |largest, &value| if value.abs() > largest.abs() { value } else { largest })
}

fn squared(value: f32) -> f32 {
    value * value
}

/// Rounds a value within ±2^22 to the nearest integer: without the instructions of newer processors, `f32::round` is a call.
fn nearest(value: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0;
    (value + SHIFT) - SHIFT
}

/// Returns what values are multiplied by before they are rounded to codes.
pub(super) fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// Returns the codes of `scale * code - minimum`, and their squared error.
fn codes_of(values: &[f32], scale: f32, minimum: f32, top: f32) -> ([f32; SUB], f32) {
    let (mut codes, mut error, factor) = ([0.0; SUB], 0.0, inverse(scale));
    for (code, value) in codes.iter_mut().zip(values) {
        *code = nearest(((value + minimum) * factor).clamp(0.0, top));
        error += squared(value - scale * *code + minimum);
    }
    (codes, error)
}

/// Returns the codes of `scale * code`, and their squared error.
fn signed_codes_of(values: &[f32], scale: f32) -> ([f32; SUB_6], f32) {
    let (mut codes, mut error, factor) = ([0.0; SUB_6], 0.0, inverse(scale));
    for (code, value) in codes.iter_mut().zip(values) {
        *code = nearest((value * factor).clamp(-32.0, 31.0));
        error += squared(value - scale * *code);
    }
    (codes, error)
}

/// Returns the integer of least error among the nearest to `near` and its neighbors; 0 if `near` is not a number, which 0 / 0 gives.
fn best_integer(near: f32, least: f32, most: f32, error: impl Fn(f32) -> f32) -> f32 {
    let near = if near.is_finite() { near.round() } else { 0.0 };
    let candidates = [near, near - 1.0, near + 1.0].map(|candidate| candidate.clamp(least, most));
    let errors = candidates.map(&error);
    let best = (1..3).fold(0, |best, at| if errors[at] < errors[best] { at } else { best });
    candidates[best]
}

/// Fits `scale * code - minimum`, neither negative, to the values. The codes of several spreads are tried; each has its best scale and minimum.
fn fit_scale_and_minimum(values: &[f32], top: f32) -> (f32, f32) {
    let least = values.iter().fold(0.0_f32, |least, &value| least.min(value));
    let most = values.iter().fold(least, |most, &value| most.max(value));
    if most == least {
        return (0.0, -least);
    }
    let count = values.len() as f32;
    let sum: f32 = values.iter().sum();
    let spread = ((most - least) / top, -least);
    let mut best = (codes_of(values, spread.0, spread.1, top).1, spread);
    for step in 0..=STEPS {
        let factor = (top + SPREAD * (2.0 * step as f32 / STEPS as f32 - 1.0)) / (most - least);
        let [mut codes, mut squares, mut products] = [0.0_f32; 3];
        for value in values {
            let code = nearest(((value - least) * factor).clamp(0.0, top));
            codes += code;
            squares += code * code;
            products += code * value;
        }
        let determinant = count * squares - codes * codes;
        if determinant <= 0.0 {
            continue;
        }
        let mut scale = (count * products - codes * sum) / determinant;
        let mut minimum = (codes * products - squares * sum) / determinant;
        if minimum < 0.0 {
            (scale, minimum) = (products / squares, 0.0);
        }
        let (_, error) = codes_of(values, scale, minimum, top);
        if error < best.0 && scale > 0.0 {
            best = (error, (scale, minimum));
        }
    }
    best.1
}

/// Numbers of roundings that are tried, and by how many codes their spread is smaller and larger than the codes.
const STEPS: usize = 20;
const SPREAD: f32 = 1.5;

/// Fits `scale * code` to the values. The scale may be negative, since there is one more negative code than positive ones.
fn fit_scale(values: &[f32]) -> f32 {
    let largest = largest_of(values);
    if largest == 0.0 {
        return 0.0;
    }
    let mut best = (f32::NEG_INFINITY, 0.0);
    for step in 0..=STEPS {
        let factor = -(32.0 + SPREAD * (2.0 * step as f32 / STEPS as f32 - 1.0)) / largest;
        let [mut squares, mut products] = [0.0_f32; 2];
        for value in values {
            let code = nearest((value * factor).clamp(-32.0, 31.0));
            squares += code * code;
            products += code * value;
        }
        // What the best scale of these codes takes off the sum of squares of the values.
        let gain = products * products / squares;
        if gain > best.0 {
            best = (gain, products / squares);
        }
    }
    best.1
}

#[cfg(test)]
mod tests {
    use std::fs::read;

    use safetensors::SafeTensors;

    use super::*;

    /// Decodes a super-block of `q4_k` (4 bits) or `q5_k`.
    fn decode_with_minima(bytes: &[u8], bits: u8) -> Vec<f32> {
        let half = |at: usize| f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32();
        let packed = &bytes[4..16];
        let high = &bytes[16..48];
        let low = &bytes[if bits == 4 { 16 } else { 48 }..];
        let value = |at: usize| {
            let (sub, place, pair) = (at / 32, at % 32, at / 64);
            let (scale, minimum) = match sub {
                0..4 => (packed[sub] & 63, packed[sub + 4] & 63),
                _ => {
                    let both = packed[sub + 4];
                    (both & 15 | packed[sub - 4] >> 6 << 4, both >> 4 | packed[sub] >> 6 << 4)
                }
            };
            let mut code = low[32 * pair + place] >> (4 * (sub % 2)) & 15;
            if bits == 5 {
                code |= (high[place] >> sub & 1) << 4;
            }
            half(0) * f32::from(scale) * f32::from(code) - half(2) * f32::from(minimum)
        };
        (0..SUPER).map(value).collect()
    }

    fn decode_q6_k(bytes: &[u8]) -> Vec<f32> {
        let d = f16::from_le_bytes([bytes[208], bytes[209]]).to_f32();
        let value = |at: usize| {
            let (half, quarter, place) = (at / 128, at % 128 / 32, at % 32);
            let low = bytes[half * 64 + quarter % 2 * 32 + place] >> (4 * (quarter / 2)) & 15;
            let high = bytes[128 + half * 32 + place] >> (2 * quarter) & 3;
            d * f32::from(bytes[192 + at / 16] as i8) * (f32::from(low | high << 4) - 32.0)
        };
        (0..SUPER).map(value).collect()
    }

    fn error(values: &[f32], decoded: &[f32]) -> f64 {
        values.iter().zip(decoded).map(|(a, b)| f64::from(a - b).powi(2)).sum()
    }

    #[test]
    fn k_quants_are_read_alike_and_closer_than_ggmls() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/gguf-k-quants.safetensors");
        let bytes = read(file).unwrap();
        let golden = SafeTensors::deserialize(&bytes).unwrap();
        let bytes_of = |name: &str| golden.tensor(name).unwrap().data().to_vec();
        let floats = |name: &str| -> Vec<f32> {
            bytes_of(name).chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
        };
        type Decode = fn(&[u8]) -> Vec<f32>;
        type Encode = fn(&[f32]) -> Vec<u8>;
        let kinds: [(&str, Encode, Decode); 3] = [
            ("q4_k", |values| q4_k(values).to_vec(), |bytes| decode_with_minima(bytes, 4)),
            ("q5_k", |values| q5_k(values).to_vec(), |bytes| decode_with_minima(bytes, 5)),
            ("q6_k", |values| q6_k(values).to_vec(), decode_q6_k),
        ];
        let values = floats("values");
        for (name, encode, decode) in kinds {
            let theirs = bytes_of(name);
            let size = theirs.len() / (values.len() / SUPER);
            let read: Vec<f32> = theirs.chunks(size).flat_map(decode).collect();
            assert_eq!(read, floats(&format!("{name}.values")), "{name}");
            let [mut ours_in_all, mut theirs_in_all] = [0.0; 2];
            for (row, (values, read)) in values.chunks(SUPER).zip(read.chunks(SUPER)).enumerate() {
                let (ours, theirs) = (error(values, &decode(&encode(values))), error(values, read));
                let size = error(values, &[0.0; SUPER]);
                // One or two different values are exact but for the rounding of d and dmin to f16.
                let bound = 1.05 * theirs + 1e-6 * size;
                assert!(ours <= bound, "{name}, row {row}: {ours:e}, ggml {theirs:e}");
                // The values of one row are so small that d is 0.
                if size > 0.0 && theirs < size / 2.0 {
                    ours_in_all += ours / size;
                    theirs_in_all += theirs / size;
                }
            }
            assert!(ours_in_all < 0.98 * theirs_in_all, "{name}: {ours_in_all}, ggml {theirs_in_all}");
        }
    }
}
