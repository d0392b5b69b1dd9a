//! A web server for tests, on this machine.
//!
//! Trade-off: one connection at a time, one request per connection.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// A request: the target, and the lines of the head in lower case.
pub(super) struct Request {
    pub(super) target: String,
    pub(super) head: String,
}

/// A response.
pub(super) struct Answer {
    status: u16,
    head: Vec<(&'static str, String)>,
    body: Vec<u8>,
    /// Only this many bytes of the body are sent, then the connection ends.
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

/// A server that responds with a function, and the log of its requests.
pub(super) struct Server {
    pub(super) address: String,
    pub(super) log: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    pub(super) fn new(answer: impl Fn(&Request) -> Answer + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let log = Arc::new(Mutex::new(Vec::new()));
        let written = Arc::clone(&log);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // A client that disconnects early does not matter to the server.
                let _ = serve(stream, &answer, &written);
            }
        });
        Self { address, log }
    }

    pub(super) fn targets(&self) -> Vec<String> {
        self.log.lock().unwrap().iter().map(|request| request.target.clone()).collect()
    }
}

fn serve(
    mut stream: TcpStream,
    answer: &impl Fn(&Request) -> Answer,
    log: &Mutex<Vec<Request>>,
) -> std::io::Result<()> {
    let mut head = String::new();
    let mut reader = BufReader::new(stream.try_clone()?);
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head)? == 0 {
            return Ok(());
        }
    }
    let target = head.split(' ').nth(1).unwrap().to_owned();
    let request = Request { target, head: head.to_ascii_lowercase() };
    let answer = answer(&request);
    log.lock().unwrap().push(request);
    write!(stream, "HTTP/1.1 {} X\r\ncontent-length: {}\r\nconnection: close\r\n", answer.status, answer.body.len())?;
    for (name, value) in answer.head {
        write!(stream, "{name}: {value}\r\n")?;
    }
    stream.write_all(b"\r\n")?;
    stream.write_all(&answer.body[..answer.sent])
}
