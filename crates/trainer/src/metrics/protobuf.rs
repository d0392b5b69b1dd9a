//! The encoding of protobuf messages, as far as event files of TensorBoard and W&B need it.
//!
//! Trade-off: field numbers are written where messages are built; no compiler of `.proto` files checks them, tests against the readers do.

const WIRE_VARINT: u8 = 0;
const WIRE_FIXED_64: u8 = 1;
const WIRE_BYTES: u8 = 2;
const WIRE_FIXED_32: u8 = 5;

pub(super) fn varint(field: u32, value: u64) -> Vec<u8> {
    let mut encoded = key(field, WIRE_VARINT);
    push_varint(&mut encoded, value);
    encoded
}

pub(super) fn double(field: u32, value: f64) -> Vec<u8> {
    [key(field, WIRE_FIXED_64), value.to_le_bytes().to_vec()].concat()
}

pub(super) fn float(field: u32, value: f32) -> Vec<u8> {
    [key(field, WIRE_FIXED_32), value.to_le_bytes().to_vec()].concat()
}

pub(super) fn string(field: u32, text: &str) -> Vec<u8> {
    bytes(field, text.as_bytes())
}

/// Encodes a message inside another, or bytes.
pub(super) fn bytes(field: u32, content: &[u8]) -> Vec<u8> {
    let mut encoded = key(field, WIRE_BYTES);
    push_varint(&mut encoded, content.len() as u64);
    encoded.extend(content);
    encoded
}

fn key(field: u32, wire: u8) -> Vec<u8> {
    let mut encoded = Vec::with_capacity(2);
    push_varint(&mut encoded, u64::from(field) << 3 | u64::from(wire));
    encoded
}

/// Appends a varint: seven bits at a time, low ones first; the top bit is set if more follow.
fn push_varint(encoded: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        encoded.push(value as u8 | 0x80);
        value >>= 7;
    }
    encoded.push(value as u8);
}

/// Splits a message into its fields as (number, raw bytes); a varint becomes 8 bytes. `None` if the message is damaged.
pub(super) fn fields(mut message: &[u8]) -> Option<Vec<(u32, Vec<u8>)>> {
    let mut found = Vec::new();
    while !message.is_empty() {
        let key = take_varint(&mut message)?;
        let length = match (key & 7) as u8 {
            WIRE_VARINT => {
                found.push(((key >> 3) as u32, take_varint(&mut message)?.to_le_bytes().to_vec()));
                continue;
            }
            WIRE_FIXED_64 => 8,
            WIRE_FIXED_32 => 4,
            WIRE_BYTES => usize::try_from(take_varint(&mut message)?).ok()?,
            _ => return None,
        };
        let (content, after) = message.split_at_checked(length)?;
        message = after;
        found.push(((key >> 3) as u32, content.to_vec()));
    }
    Some(found)
}

fn take_varint(message: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, after) = message.split_first()?;
        *message = after;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_the_inverse_of_their_encoding() {
        let long = "x".repeat(300);
        let message = [varint(1, 0), varint(200, u64::MAX), double(2, 1.5), float(3, -2.0), string(17, &long)].concat();
        let read = fields(&message).unwrap();
        let expected = [
            (1, 0_u64.to_le_bytes().to_vec()),
            (200, u64::MAX.to_le_bytes().to_vec()),
            (2, 1.5_f64.to_le_bytes().to_vec()),
            (3, (-2.0_f32).to_le_bytes().to_vec()),
            (17, long.into_bytes()),
        ];
        assert_eq!(read, expected);
        assert_eq!(fields(&message[..message.len() - 1]), None);
    }
}
