package rdmanet

import (
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/smbdpeer"
)

// queueBuffers queues messages that go by transfers and returns them with what the
// peer is told: of some of them at a time.
func queueBuffers(t *testing.T, c *Conn, p *smbdpeer.Raw, reads bool) (sends []*PendingMessage, told []smbdpeer.Transfer) {
	p.Grant(maxTransfers)
	for i := range 2 * maxBounceBuffers {
		buf := alloc(t, breachWrite)
		copy(buf.Bytes(), pattern(uint64(i), breachWrite))
		sends = append(sends, c.QueueMsg(buf.Bytes()))
	}
	for range maxBounceBuffers {
		told = append(told, p.ExpectBegin(reads))
	}
	// One has the turn, and the others wait for it.
	require.True(t, eventually(func() bool { return running("rdmanet.(*conn).offer(") == 1 }))
	return sends, told
}

func requireUnderWay(t *testing.T, sends []*PendingMessage) {
	t.Helper()
	for _, q := range sends {
		select {
		case <-q.Done():
			require.FailNow(t, "done before the peer has it")
		default:
		}
	}
}

// Queued sends follow each other while the peer fetches. A deadline concerns those of
// which it has not been told.
func TestTransferQueue(t *testing.T) {
	for _, late := range []bool{false, true} {
		t.Run(map[bool]string{false: "all", true: "deadline"}[late], func(t *testing.T) {
			eachTransferPeer(t, func(t *testing.T, s *scene, c *Conn, p *smbdpeer.Raw, reads bool) {
				sends, told := queueBuffers(t, c, p, reads)
				if late {
					c.SetWriteDeadline(past)
					for _, q := range sends[maxBounceBuffers:] {
						n, err := q.Result()
						require.Zero(t, n)
						requireTimeout(t, err)
					}
					sends = sends[:maxBounceBuffers]
				}
				for i, q := range sends {
					requireUnderWay(t, sends[i:])
					require.EqualValues(t, i+1, told[i].ID)
					defect.Bytes(t, pattern(uint64(i), breachWrite), p.Take(reads, told[i]))
					n, err := q.Result()
					require.NoError(t, err)
					require.Equal(t, breachWrite, n)
					if len(told) < len(sends) {
						told = append(told, p.ExpectBegin(reads))
					}
				}
				require.Zero(t, c.Stats().BytesCopied)
				c.SetWriteDeadline(time.Time{})
				_, err := c.Write([]byte("onwards"))
				require.NoError(t, err)
			})
		})
	}
}

// A peer that takes several at once says so once.
func TestTransferQueueDoneForSeveral(t *testing.T) {
	s := newScene(t)
	c, p := s.transferConns(true, true)
	sends, told := queueBuffers(t, c, p, true)
	p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Done, ID: told[2].ID, Length: told[2].Length})
	for _, q := range sends[:3] {
		n, err := q.Result()
		require.NoError(t, err)
		require.Equal(t, breachWrite, n)
	}
	requireUnderWay(t, sends[3:])
}

// What is under way ends with the connection, whichever way that ends; its memory is
// the caller's again then.
func TestTransferQueueConnectionEnds(t *testing.T) {
	for _, tt := range []struct {
		name string
		do   func(c *Conn, p *smbdpeer.Raw)
		want error
	}{
		{"Close", func(c *Conn, p *smbdpeer.Raw) { c.Close() }, net.ErrClosed},
		{"peer goes", func(c *Conn, p *smbdpeer.Raw) { p.ID.Disconnect() }, syscall.EPIPE},
		{"breach", func(c *Conn, p *smbdpeer.Raw) { p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Done, ID: 100}) }, syscall.ECONNRESET},
	} {
		t.Run(tt.name, func(t *testing.T) {
			eachTransferPeer(t, func(t *testing.T, s *scene, c *Conn, p *smbdpeer.Raw, reads bool) {
				sends, _ := queueBuffers(t, c, p, reads)
				tt.do(c, p)
				for _, q := range sends {
					n, err := q.Result()
					require.Zero(t, n)
					require.ErrorIs(t, err, tt.want)
				}
				within(t, "Close", func() { c.Close() })
			})
		})
	}
}

// Close sees off what is under way, as what was written.
func TestTransferQueueLinger(t *testing.T) {
	for _, m := range transferPeers {
		t.Run(m.name, func(t *testing.T) {
			s := newScene(t)
			s.cfg.LingerTimeout = patience
			c, p := s.transferConns(true, m.reads)
			sends, told := queueBuffers(t, c, p, m.reads)
			closed := make(chan error, 1)
			go func() { closed <- c.Close() }()
			for _, q := range sends[maxBounceBuffers:] {
				_, err := q.Result()
				require.ErrorIs(t, err, net.ErrClosed)
			}
			for i, h := range told {
				defect.Bytes(t, pattern(uint64(i), breachWrite), p.Take(m.reads, h))
				n, err := sends[i].Result()
				require.NoError(t, err)
				require.Equal(t, breachWrite, n)
			}
			p.WaitEnd()
			require.NoError(t, <-closed)
		})
	}
}
