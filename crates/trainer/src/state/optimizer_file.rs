//! The files of an optimizer's state: tensors by name in safetensors, elements little-endian as they are in memory.
//!
//! Trade-off: a rank reads all of the state into host memory before it takes what it needs.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;
use std::slice::from_ref;

use firebrick_kernels::Kernels;
use firebrick_optim::{HostTensor, Optimizer, SavedTensor, StateDict};
use safetensors::tensor::{Metadata, TensorView};
use safetensors::{Dtype, SafeTensorError, View};

use crate::error::RunError;
use crate::storage::StorageError;

/// A state tensor that is copied to the host when its turn to be written has come.
struct OnDevice<'a, B: Kernels>(SavedTensor<'a, B>);

impl<B: Kernels> View for OnDevice<'_, B> {
    fn dtype(&self) -> Dtype {
        if self.0.is_bytes { Dtype::U8 } else { Dtype::F32 }
    }

    fn shape(&self) -> &[usize] {
        from_ref(&self.0.elements)
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Owned(self.0.bytes())
    }

    fn data_len(&self) -> usize {
        self.0.elements * if self.0.is_bytes { 1 } else { size_of::<f32>() }
    }
}

/// Returns the bytes of an optimizer's state in a file.
pub(crate) fn state_bytes<B: Kernels>(optimizer: &Optimizer<B>) -> u64 {
    optimizer.saved().map(|tensor| OnDevice(tensor).data_len() as u64).sum()
}

/// Writes the state of an optimizer, with one tensor in host memory at a time. Waits for the device.
pub(crate) fn write_from_device<B: Kernels>(path: &Path, optimizer: &Optimizer<B>) -> Result<(), StorageError> {
    let tensors = optimizer.saved().map(|tensor| (tensor.name.clone(), OnDevice(tensor)));
    write(path, state_bytes(optimizer), tensors)
}

/// Writes a state that is in host memory.
pub(crate) fn write_held(path: &Path, state: &StateDict) -> Result<(), StorageError> {
    let tensors: Vec<_> = state.iter().map(|(name, tensor)| (name, view(tensor))).collect();
    let bytes = tensors.iter().map(|(_, view)| view.data_len() as u64).sum();
    write(path, bytes, tensors.into_iter())
}

fn view(tensor: &HostTensor) -> TensorView<'_> {
    let (dtype, elements, bytes) = match tensor {
        HostTensor::F32(values) => (Dtype::F32, values.len(), bytemuck::cast_slice(values)),
        HostTensor::U8(codes) => (Dtype::U8, codes.len(), codes.as_slice()),
    };
    TensorView::new(dtype, vec![elements], bytes).expect("a flat tensor has the bytes of its elements")
}

/// Writes tensors one after another, those of the widest type first. `bytes`: their sum, for the message of a full disk.
fn write<S: AsRef<str> + Ord + std::fmt::Display, V: View>(
    path: &Path,
    bytes: u64,
    tensors: impl Iterator<Item = (S, V)>,
) -> Result<(), StorageError> {
    safetensors::serialize_to_file(tensors, None, path).map_err(|error| match error {
        SafeTensorError::IoError(source) => StorageError::writing(path, bytes, source),
        other => unreachable!("the shapes of flat tensors are those of their bytes: {other}"),
    })
}

/// Reads a state.
///
/// # Errors
/// [`StorageError::Damaged`] if the file cannot be read.
pub(crate) fn read_optimizer(path: &Path) -> Result<StateDict, RunError> {
    let damaged = |error: io::Error| {
        let problem = format!("cannot be read: {error}");
        StorageError::Damaged { path: path.to_owned(), problem }
    };
    Ok(read(path).map_err(damaged)?)
}

fn read(path: &Path) -> io::Result<StateDict> {
    let mut file = BufReader::new(File::open(path)?);
    let (mut length, mut header) = ([0; 8], Vec::new());
    file.read_exact(&mut length)?;
    file.by_ref().take(u64::from_le_bytes(length)).read_to_end(&mut header)?;
    let metadata: Metadata = serde_json::from_slice(&header)?;
    if (length.len() + header.len() + metadata.data_len()) as u64 != file.get_ref().metadata()?.len() {
        return Err(io::Error::other("its length is not that of the tensors in its header"));
    }
    let mut state = StateDict::new();
    for name in metadata.offset_keys() {
        let info = metadata.info(&name).expect("the name is one of the header's");
        let bytes = info.data_offsets.1 - info.data_offsets.0;
        let tensor = match info.dtype {
            Dtype::F32 => {
                let mut values = vec![0.0_f32; bytes / size_of::<f32>()];
                file.read_exact(bytemuck::cast_slice_mut(&mut values))?;
                HostTensor::F32(values)
            }
            Dtype::U8 => {
                let mut codes = vec![0; bytes];
                file.read_exact(&mut codes)?;
                HostTensor::U8(codes)
            }
            other => {
                return Err(io::Error::other(format!("`{name}` is stored as {other:?}, unlike any state of ours")));
            }
        };
        state.insert(name, tensor);
    }
    Ok(state)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn optimizer_state_reads_back_bit_for_bit_and_not_if_it_is_cut_short() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("optimizer.safetensors");
        let values = HostTensor::F32(vec![1.5, -0.0, f32::MIN_POSITIVE]);
        let codes = HostTensor::U8(vec![0, 255, 7]);
        let state: StateDict = [("a.exp_avg".to_owned(), values), ("a.exp_avg.codes".to_owned(), codes)].into();
        write_held(&path, &state).unwrap();
        assert_eq!(read_optimizer(&path).unwrap(), state);
        let whole = fs::read(&path).unwrap();
        for length in [whole.len() - 1, 40, 0] {
            fs::write(&path, &whole[..length]).unwrap();
            let message = read_optimizer(&path).unwrap_err().to_string();
            assert!(message.contains("optimizer.safetensors"), "{message}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn full_disk_is_a_clear_error() {
        let state: StateDict = [("a".to_owned(), HostTensor::F32(vec![1.0; 4096]))].into();
        // Linux answers every write to /dev/full like a full disk.
        let error = write_held(Path::new("/dev/full"), &state).unwrap_err();
        assert!(matches!(error, StorageError::DiskFull { needed: 16384, .. }), "{error}");
    }
}
