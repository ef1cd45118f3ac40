package twin

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"time"

	"github.com/rdmanet/rdmanet/internal/smbdpeer"
)

// plainConn is an SMB Direct peer that is not rdmanet, as an end of a program. It has no
// half-close and no deadlines, and its program uses none.
type plainConn struct {
	*smbdpeer.Peer
}

func (c *plainConn) ReadFrom(r io.Reader) (int64, error) {
	return io.Copy(struct{ io.Writer }{c.Peer}, r)
}
func (c *plainConn) WriteTo(w io.Writer) (int64, error) {
	return io.Copy(w, struct{ io.Reader }{c.Peer})
}
func (c *plainConn) CloseRead() error                 { return errors.ErrUnsupported }
func (c *plainConn) CloseWrite() error                { return errors.ErrUnsupported }
func (c *plainConn) SetDeadline(time.Time) error      { return errors.ErrUnsupported }
func (c *plainConn) SetReadDeadline(time.Time) error  { return errors.ErrUnsupported }
func (c *plainConn) SetWriteDeadline(time.Time) error { return errors.ErrUnsupported }
func (c *plainConn) LocalAddr() net.Addr              { return nil }
func (c *plainConn) RemoteAddr() net.Addr             { return nil }

func (r *run) dialPlain(ctx context.Context, to netip.AddrPort) (player, error) {
	p, err := smbdpeer.Dial(ctx, r.m.Provider, to)
	if err != nil {
		return nil, err
	}
	return r.newEnd(1, &plainConn{p}), nil
}

func (r *run) listenPlain(ctx context.Context) (*listener, error) {
	host, err := netip.ParseAddr(r.m.Host)
	if err != nil {
		return nil, err
	}
	ln, err := smbdpeer.Listen(ctx, r.m.Provider, netip.AddrPortFrom(host, 0))
	if err != nil {
		return nil, err
	}
	return &listener{
		addr: ln.Addr().String(),
		accept: func() (player, error) {
			p, err := ln.Accept(ctx)
			if err != nil {
				return nil, err
			}
			return r.newEnd(1, &plainConn{p}), nil
		},
		close: ln.Close,
	}, nil
}

// breaches are the ways in which a message can be malformed.
const breaches = 6

// malformed sends a message that is malformed in the given way, between two that are not.
// All three have bytes of the stream. Only the first one may reach the reader. It has
// breachBytes bytes.
func (c *plainConn) malformed(way int, s stream, at int64) error {
	message := func(off int64, change func(h *smbdpeer.DataTransfer)) []byte {
		h := smbdpeer.DataTransfer{CreditsRequested: 255, CreditsGranted: 1, DataOffset: 24, DataLength: breachBytes}
		if change != nil {
			change(&h)
		}
		b := h.Append(nil)
		p := make([]byte, breachBytes)
		s.fill(p, off)
		return append(b, p...)
	}
	bad := message(at+breachBytes, func(h *smbdpeer.DataTransfer) {
		switch way % breaches {
		case 0:
			h.CreditsRequested = 0
		case 1:
			h.DataOffset = 20 // 20 is not a multiple of eight.
		case 2:
			h.DataLength = 100_000 // The payload would end behind the message.
		case 3:
			h.DataOffset = 8 // 8 is inside the header.
		case 4:
			h.RemainingDataLength = 1 << 31 // No message may be so long.
		}
	})
	if way%breaches == 5 {
		bad = bad[:12] // The message is shorter than the header.
	}
	return c.Post(message(at, nil), bad, message(at+2*breachBytes, nil))
}

// breachBytes is the length of the payload of each message around a malformed one.
const breachBytes = 64
