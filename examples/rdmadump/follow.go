package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/rdmanet/rdmanet/capture"
)

// follower writes what the sides of connections have sent to files:
//
//	conn1-initiator.bin              the messages of the upper layer, one after the other
//	conn1-initiator.gaps             what is missing from that, if anything is
//	conn1-initiator-7.transfer       data of an SMB2 READ or WRITE that went by RDMA
//	conn1-responder-1a2b3c4d-0.chunk a write chunk of an RPC reply, by XID
//
// If the upper layer is not known, the messages are the Sends.
type follower struct {
	dir    string
	filter *filter
	files  map[string]*followed
	err    error
}

type followed struct {
	f *os.File
	w *bufio.Writer
}

const maxFiles = 128 // maxFiles is how many files are open at a time.

func newFollower(dir string, f *filter) (*follower, error) {
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return nil, err
	}
	old, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, f := range old {
		if earlier, _ := filepath.Match("conn*-*", f.Name()); earlier {
			return nil, fmt.Errorf("-follow: %s has files of an earlier run", dir)
		}
	}
	return &follower{dir: dir, filter: f, files: map[string]*followed{}}, nil
}

// chain makes cfg's functions call the follower first.
func (f *follower) chain(cfg *capture.Config) {
	message, upper, loss := cfg.Message, cfg.Upper, cfg.Loss
	cfg.Message = func(m *capture.Message) {
		f.message(m)
		if message != nil {
			message(m)
		}
	}
	cfg.Upper = func(u *capture.UpperMessage) {
		f.upper(u)
		if upper != nil {
			upper(u)
		}
	}
	cfg.Loss = func(l capture.Loss) {
		if l.Conn != nil && f.filter.match(l.Conn) {
			f.write(name(l.Conn, l.From)+".gaps", fmt.Appendf(nil, "%v\n", l))
		}
		loss(l)
	}
}

func name(c *capture.Conn, side capture.Side) string {
	s := "initiator"
	if side == capture.Responder {
		s = "responder"
	}
	return fmt.Sprintf("conn%d-%s", c.ID, s)
}

// message writes Sends of an unknown upper layer.
func (f *follower) message(m *capture.Message) {
	known := m.Conn.Protocol == capture.SMBDirect || m.Conn.Protocol == capture.RPCRDMA
	if m.Kind == capture.Send && !known && f.filter.match(m.Conn) {
		f.write(name(m.Conn, m.From)+".bin", m.Data)
		if !m.Complete {
			f.gap(m.Conn, m.From, fmt.Sprintf("Send of %d bytes: %s", m.Size, gaps(m.Missing, m.Size, m.Got, m.HeadLost, m.TailLost)))
		}
	}
}

func (f *follower) gap(c *capture.Conn, side capture.Side, what string) {
	f.write(name(c, side)+".gaps", []byte(what+"\n"))
}

func (f *follower) upper(u *capture.UpperMessage) {
	if !f.filter.match(u.Conn) {
		return
	}
	base := name(u.Conn, u.From)
	switch u.Kind {
	case capture.Payload, capture.Call, capture.Reply:
		f.write(base+".bin", u.Data)
		for i, k := range u.Writes {
			if u.Kind == capture.Reply {
				f.write(fmt.Sprintf("%s-%08x-%d.chunk", base, u.XID, i), k.Data)
			}
		}
	case capture.Transfer:
		if u.Op != 0 { // The message is a part of an rdmanet stream.
			f.write(base+".bin", u.Data)
		} else {
			f.write(fmt.Sprintf("%s-%d.transfer", base, u.ID), u.Data)
		}
	case capture.Negotiation, capture.Credits, capture.Control:
		return
	}
	if !u.Complete {
		f.gap(u.Conn, u.From, fmt.Sprintf("%v of %d bytes: %s", u.Kind, u.Size, gaps(u.Missing, u.Size, u.Got, u.HeadLost, u.TailLost)))
	}
}

func (f *follower) write(name string, b []byte) {
	x := f.files[name]
	if x == nil {
		if len(f.files) >= maxFiles {
			f.closeAll()
		}
		file, err := os.OpenFile(filepath.Join(f.dir, name), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o666)
		if err != nil {
			f.err = errors.Join(f.err, err)
			return
		}
		x = &followed{file, bufio.NewWriter(file)}
		f.files[name] = x
	}
	if _, err := x.w.Write(b); err != nil && f.err == nil {
		f.err = err
	}
}

func (f *follower) closeAll() {
	for name, x := range f.files {
		if err := errors.Join(x.w.Flush(), x.f.Close()); err != nil && f.err == nil {
			f.err = err
		}
		delete(f.files, name)
	}
}

func (f *follower) close() error {
	f.closeAll()
	return f.err
}
