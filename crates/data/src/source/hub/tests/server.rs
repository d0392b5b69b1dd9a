//! A web server for tests, on this machine.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// What was asked: the target, and the lines of the head in small letters.
pub(super) struct Asked {
    pub(super) target: String,
    pub(super) head: String,
}

/// What to answer.
pub(super) struct Answer {
    status: u16,
    head: Vec<(&'static str, String)>,
    body: Vec<u8>,
    /// So many bytes of the body are sent, then the connection ends.
    pub(super) sent: usize,
}

impl Answer {
    pub(super) fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        let body = body.into();
        Self { status, head: Vec::new(), sent: body.len(), body }
    }

    pub(super) fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.head.push((name, value.into()));
        self
    }
}

/// A server that answers with a function, and what it was asked.
pub(super) struct Server {
    pub(super) address: String,
    pub(super) log: Arc<Mutex<Vec<Asked>>>,
}

impl Server {
    pub(super) fn new(answer: impl Fn(&Asked) -> Answer + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let log = Arc::new(Mutex::new(Vec::new()));
        let written = Arc::clone(&log);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // A client that goes away early is none of the server's business.
                let _ = serve(stream, &answer, &written);
            }
        });
        Self { address, log }
    }

    pub(super) fn targets(&self) -> Vec<String> {
        self.log.lock().unwrap().iter().map(|asked| asked.target.clone()).collect()
    }
}

fn serve(mut stream: TcpStream, answer: &impl Fn(&Asked) -> Answer, log: &Mutex<Vec<Asked>>) -> std::io::Result<()> {
    let mut head = String::new();
    let mut reader = BufReader::new(stream.try_clone()?);
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head)? == 0 {
            return Ok(());
        }
    }
    let target = head.split(' ').nth(1).unwrap().to_owned();
    let asked = Asked { target, head: head.to_ascii_lowercase() };
    let answer = answer(&asked);
    log.lock().unwrap().push(asked);
    write!(stream, "HTTP/1.1 {} X\r\ncontent-length: {}\r\nconnection: close\r\n", answer.status, answer.body.len())?;
    for (name, value) in answer.head {
        write!(stream, "{name}: {value}\r\n")?;
    }
    stream.write_all(b"\r\n")?;
    stream.write_all(&answer.body[..answer.sent])
}
