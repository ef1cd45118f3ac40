package rdmanet

import (
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/smbdpeer"
)

// The connection is cut at every step: each call ends with an error, and nothing
// is left.
func TestTransferConnectionLost(t *testing.T) {
	const n = 1 << 20
	leave := map[string]func(p *smbdpeer.Raw){
		"disconnects": func(p *smbdpeer.Raw) { p.ID.Disconnect() },
		"drops":       func(p *smbdpeer.Raw) { p.Close() },
	}
	steps := []struct {
		name   string
		only   int // as in TestTransferProtocolViolations
		writes bool
		small  bool // the reader takes little at a time
		idle   bool // there is none
		do     func(p *smbdpeer.Raw, c *Conn, reads bool)
	}{
		{name: "offered", writes: true, do: func(p *smbdpeer.Raw, c *Conn, reads bool) { p.ExpectBegin(reads) }},
		{name: "fetched", only: 1, writes: true, do: func(p *smbdpeer.Raw, c *Conn, reads bool) {
			h := p.ExpectBegin(reads)
			p.RDMA(ibv.OpRead, make([]byte, 1000), h.Addr, h.Key)
		}},
		{name: "granted", only: 2, writes: true, do: func(p *smbdpeer.Raw, c *Conn, reads bool) {
			p.ExpectBegin(reads)
			addr, key := p.Register(make([]byte, n))
			p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Grant, ID: 1, Addr: addr, Key: key, Length: n / 2})
		}},
		{name: "written", only: 2, writes: true, do: func(p *smbdpeer.Raw, c *Conn, reads bool) {
			p.ExpectBegin(reads)
			addr, key := p.Register(make([]byte, n))
			p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Grant, ID: 1, Addr: addr, Key: key, Length: n / 2})
			p.ExpectTransfer(smbdpeer.Written)
		}},
		{name: "withdrawn", writes: true, do: func(p *smbdpeer.Raw, c *Conn, reads bool) {
			p.ExpectBegin(reads)
			c.SetWriteDeadline(time.Unix(1, 0))
			p.ReceiveTransfer()
		}},
		{name: "begun, for a large Read", do: func(p *smbdpeer.Raw, c *Conn, reads bool) { p.BeginFirst(reads, n) }},
		{name: "begun, for a small Read", small: true, do: func(p *smbdpeer.Raw, c *Conn, reads bool) { p.BeginFirst(reads, n) }},
		{name: "begun, for nobody", idle: true, do: func(p *smbdpeer.Raw, c *Conn, reads bool) { p.BeginFirst(reads, n) }},
		{name: "grant heard", only: 2, do: func(p *smbdpeer.Raw, c *Conn, reads bool) {
			p.BeginFirst(reads, n)
			p.ExpectTransfer(smbdpeer.Grant)
		}},
		{name: "grant for a small Read heard", only: 2, small: true, do: func(p *smbdpeer.Raw, c *Conn, reads bool) {
			p.BeginFirst(reads, n)
			p.ExpectTransfer(smbdpeer.Grant)
		}},
		{name: "grant for nobody heard", only: 2, idle: true, do: func(p *smbdpeer.Raw, c *Conn, reads bool) {
			p.BeginFirst(reads, n)
			p.ExpectTransfer(smbdpeer.Grant)
		}},
		{name: "grant used", only: 2, do: func(p *smbdpeer.Raw, c *Conn, reads bool) {
			p.BeginFirst(reads, n)
			h := p.ExpectTransfer(smbdpeer.Grant)
			p.RDMA(ibv.OpWrite, make([]byte, 1000), h.Addr, h.Key)
		}},
		{name: "grant of a small Read answered", only: 2, small: true, do: func(p *smbdpeer.Raw, c *Conn, reads bool) {
			p.BeginFirst(reads, n)
			h := p.ExpectTransfer(smbdpeer.Grant)
			p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Written, ID: 1, Length: h.Length})
		}},
		{name: "withdrawn by the peer", do: func(p *smbdpeer.Raw, c *Conn, reads bool) {
			p.BeginFirst(reads, n)
			p.WithdrawTransfer(reads, 1, 0)
		}},
	}
	for _, step := range steps {
		for how, quit := range leave {
			t.Run(step.name+"/"+how, func(t *testing.T) {
				eachTransferPeer(t, func(t *testing.T, s *scene, c *Conn, p *smbdpeer.Raw, reads bool) {
					if step.only == 1 && !reads || step.only == 2 && reads {
						return
					}
					var call chan result
					switch {
					case step.writes:
						call = writing(c, alloc(t, n).Bytes())
					case step.small:
						call = make(chan result, 1)
						go func() {
							_, err := io.CopyBuffer(io.Discard, struct{ io.Reader }{c}, make([]byte, 100))
							call <- result{err: err}
						}()
					case !step.idle:
						call = reading(c, make([]byte, 2*n))
					}
					step.do(p, c, reads)
					quit(p)
					if call != nil {
						r := s.await(call)
						require.Error(t, r.err)
						var op *net.OpError
						require.True(t, errors.As(r.err, &op) || r.err == io.ErrUnexpectedEOF, "%v", r.err)
						require.Less(t, r.n, 2*n)
					}
					c.SetDeadline(time.Now().Add(patience))
					_, err := io.Copy(io.Discard, c)
					require.Error(t, err, "the stream has no end")
					require.False(t, errors.Is(err, os.ErrDeadlineExceeded), "%v", err)
					_, err = c.Write(make([]byte, breachWrite))
					require.Error(t, err)
					within(t, "Close", func() { c.Close() })
				})
			})
		}
	}
}

// What fails, or is withdrawn, after nobody wants it any more is given back, too.
func TestTransferCloseReadReleasesMemory(t *testing.T) {
	eachTransferPeer(t, func(t *testing.T, s *scene, c *Conn, p *smbdpeer.Raw, reads bool) {
		e := s.end(c)
		e.Hold(func(wc *ibv.WC) bool { return wc.Status != ibv.WCSuccess && e.IsSend(wc) })
		before := countScratch()
		p.Begin(reads, 1, 1<<20, 4096, bogus)
		if reads {
			require.True(t, eventually(func() bool { return e.Reading() > 0 }))
		} else {
			p.ExpectTransfer(smbdpeer.Grant)
		}
		require.Greater(t, countScratch(), before)
		require.NoError(t, c.CloseRead())
		if reads {
			e.Hold(nil)
		} else {
			p.WithdrawTransfer(false, 1, 0)
		}
		if !eventually(func() bool { return countScratch() == before }) {
			defect.Leak(t, "%d chunks in use, %d before", countScratch(), before)
		}
		require.NoError(t, c.Close())
	})
}

// CloseRead, Close and deadlines end what waits for a peer that moves nothing.
func TestTransferReadEndsWithoutData(t *testing.T) {
	setWithdrawWithin(t, 100*time.Millisecond)
	const n = 1 << 20
	for name, end := range map[string]func(c *Conn) error{
		"CloseRead": (*Conn).CloseRead,
		"Close":     (*Conn).Close,
		"deadline":  func(c *Conn) error { return c.SetReadDeadline(time.Unix(1, 0)) },
	} {
		for _, size := range []int{10, n} {
			t.Run(name, func(t *testing.T) {
				s := newScene(t)
				c, p := s.transferConns(false, false)
				read := reading(c, make([]byte, size))
				p.BeginFirst(false, n)
				p.ExpectTransfer(smbdpeer.Grant)
				within(t, name, func() { require.NoError(t, end(c)) })
				r := s.await(read)
				require.Zero(t, r.n)
				switch name {
				case "CloseRead":
					require.Equal(t, io.EOF, r.err)
				case "Close":
					require.ErrorIs(t, r.err, net.ErrClosed)
				default:
					require.ErrorIs(t, r.err, os.ErrDeadlineExceeded)
				}
			})
		}
	}
}

// A Close that does not linger waits for no peer, also where a Write has waited already
// for the peer to give up a transfer.
func TestTransferCloseDuringWithdrawal(t *testing.T) {
	for _, side := range sides {
		t.Run(side.name, func(t *testing.T) {
			s := newScene(t)
			setWithdrawWithin(t, time.Hour)
			c, p := s.transferConns(side.active, true)
			wrote := writing(c, pattern(1, 100000))
			h := p.ExpectBegin(true)
			c.SetWriteDeadline(time.Now())
			require.Equal(t, h.ID, p.ExpectTransfer(smbdpeer.Withdraw).ID) // to which it says nothing
			within(t, "Close", func() { c.Close() })
			require.ErrorIs(t, s.await(wrote).err, os.ErrDeadlineExceeded)
		})
	}
}
