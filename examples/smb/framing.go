package main

import (
	"encoding/binary"
	"errors"
	"io"
	"net"

	"github.com/rdmanet/rdmanet"
)

// SMB over TCP puts four bytes in front of each message. The first byte is zero, and the
// other three are the length ([MS-SMB2] 2.1). SMB Direct does not need them, because it
// keeps the boundaries of messages.
const headerLen = 4

var errHeader = errors.New("not the header of an SMB message")

// messageLen decodes these four bytes.
func messageLen(header []byte) (int, error) {
	n := binary.BigEndian.Uint32(header)
	if n>>24 != 0 {
		return 0, errHeader
	}
	return int(n), nil
}

// framed is an SMB Direct connection as the stream that SMB over TCP uses. One goroutine
// may read and one may write at the same time.
type framed struct {
	*rdmanet.Conn
	in, rest []byte // in is a message that was received, and rest is what was not read of it.
	out      []byte // out is the beginning of a message to send.
}

func frame(c *rdmanet.Conn) *framed {
	return &framed{Conn: c, in: make([]byte, headerLen+maxMessage)}
}

func (f *framed) Read(p []byte) (int, error) {
	if len(f.rest) == 0 {
		n, err := f.Conn.ReadMsg(f.in[headerLen:])
		if err != nil {
			return 0, err
		}
		binary.BigEndian.PutUint32(f.in, uint32(n))
		f.rest = f.in[:headerLen+n]
	}
	n := copy(p, f.rest)
	f.rest = f.rest[n:]
	return n, nil
}

func (f *framed) Write(p []byte) (int, error) {
	f.out = append(f.out, p...)
	for len(f.out) >= headerLen {
		n, err := messageLen(f.out)
		if err != nil {
			return 0, err
		}
		if len(f.out) < headerLen+n {
			break
		}
		if _, err := f.Conn.WriteMsg(f.out[headerLen:][:n]); err != nil {
			return 0, err
		}
		f.out = append(f.out[:0], f.out[headerLen+n:]...)
	}
	return len(p), nil
}

// relay copies messages between an SMB Direct connection and a TCP connection until either
// ends. Then it closes both.
func relay(direct *rdmanet.Conn, tcp net.Conn) error {
	f := frame(direct)
	errs := make(chan error, 2)
	pass := func(to io.Writer, from io.Reader) {
		_, err := io.Copy(to, from)
		errs <- err // The cause is sent before its consequence ends the other direction.
		direct.Close()
		tcp.Close()
	}
	// Only the methods of framed are visible: those of the Conn in it would copy a stream.
	go pass(tcp, struct{ io.Reader }{f})
	go pass(struct{ io.Writer }{f}, tcp)
	err := <-errs
	<-errs
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}
