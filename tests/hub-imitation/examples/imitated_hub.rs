//! Serves an imitated Hub to other clients: `imitated_hub ADDRESS [OWNER/NAME=FOLDER]...`; the token is `hf_imitated`.
//!
//! Trade-off: folders are read into memory, without their subfolders.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::io::Write;

use firebrick_hub_imitation::ImitatedHub;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().ok_or("give an address such as 127.0.0.1:8080")?;
    let hub = ImitatedHub::at(&address, "hf_imitated");
    for argument in arguments {
        let (id, folder) = argument.split_once('=').ok_or("give repositories as OWNER/NAME=FOLDER")?;
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            if entry.path().is_file() {
                files.insert(entry.file_name().to_string_lossy().into_owned(), fs::read(entry.path())?);
            }
        }
        hub.store().repos.entry(id.to_owned()).or_default().commit(files);
    }
    writeln!(std::io::stdout(), "{}", hub.server.address)?;
    loop {
        std::thread::park();
    }
}
