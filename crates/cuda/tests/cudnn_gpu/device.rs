//! Device memory for the tests: filled when it is allocated, and rows that are apart.

use firebrick_cuda::DeviceBuffer;

use crate::memory::Device;

/// The byte of a NaN in the 16-bit types and in f32, so that memory that was not written shows.
pub(crate) const NAN: u8 = 0xFF;

pub(crate) struct Gpu {
    pub(crate) device: Device,
    /// The byte that buffers are filled with.
    pub(crate) fill: u8,
}

impl Gpu {
    /// Returns the bits of a 16-bit element that was not written.
    pub(crate) fn untouched(&self) -> u16 {
        u16::from_ne_bytes([self.fill; 2])
    }

    /// Returns a filled buffer of `bytes` bytes.
    pub(crate) fn buffer(&self, bytes: usize) -> DeviceBuffer {
        self.device.upload(&vec![self.fill; bytes])
    }

    /// Uploads rows of `width` 16-bit values into rows `stride` apart.
    pub(crate) fn upload_rows(&self, address: u64, stride: usize, width: usize, values: &[u16]) {
        let mut all = self.device.read::<u16>(address, (values.len() / width - 1) * stride + width);
        all.chunks_mut(stride).zip(values.chunks(width)).for_each(|(all, row)| all[..width].copy_from_slice(row));
        self.device.write(address, &all);
    }

    pub(crate) fn download_rows(&self, address: u64, stride: usize, width: usize, rows: usize) -> Vec<u16> {
        let all = self.device.read::<u16>(address, (rows - 1) * stride + width);
        all.chunks(stride).flat_map(|row| &row[..width]).copied().collect()
    }
}
