package rdmanet

import (
	"bytes"
	"errors"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/defect"
)

// The contract of net.Conn as far as it holds for datagrams: golang.org/x/net/nettest
// has it for streams only, so these ask the same of connected and of other
// PacketConns.

// packetEnd is a PacketConn with the peer that it talks to.
type packetEnd struct {
	*PacketConn
	to netip.AddrPort // of one that is not connected
}

func (e packetEnd) Write(b []byte) (int, error) {
	if e.to.IsValid() {
		return e.WriteToUDPAddrPort(b, e.to)
	}
	return e.PacketConn.Write(b)
}

func (e packetEnd) Read(b []byte) (int, error) {
	n, _, err := e.ReadFromUDPAddrPort(b)
	return n, err
}

// eachPacketEnd runs f with the ends of a pair in either role.
func eachPacketEnd(t *testing.T, f func(t *testing.T, a, b packetEnd)) {
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		client, server := pn.pair(t)
		a, b := packetEnd{client, netip.AddrPort{}}, packetEnd{server, addrPort(client.LocalAddr())}
		f(t, a, b)
		f(t, b, a)
	})
}

// The caller's memory is the caller's when a call returns, also at a deadline.
func TestPacketRacyBuffers(t *testing.T) {
	eachPacketEnd(t, func(t *testing.T, a, b packetEnd) {
		var wg sync.WaitGroup
		stop := make(chan struct{})
		wg.Go(func() {
			msg := make([]byte, 200)
			for i := byte(0); ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				for j := range msg {
					msg[j] = i
				}
				if _, err := a.Write(msg); err != nil {
					t.Error(err)
					return
				}
			}
		})
		var readers sync.WaitGroup
		for range 4 {
			readers.Go(func() {
				buf := make([]byte, 200)
				for range 100 {
					b.SetReadDeadline(time.Now().Add(time.Millisecond))
					n, err := b.Read(buf)
					if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
						t.Error(err)
						return
					}
					if n > 0 {
						if err := defect.Differ(bytes.Repeat(buf[:1], n), buf[:n]); err != nil {
							t.Errorf("a datagram is mixed: %v", err)
						}
					}
					clear(buf)
				}
			})
		}
		readers.Wait()
		close(stop)
		wg.Wait()
		takeAll(t, b)
	})
}

// takeAll takes what waits.
func takeAll(t testing.TB, e packetEnd) {
	t.Helper()
	buf := make([]byte, 10)
	for {
		e.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		if _, err := e.Read(buf); err != nil {
			requireTimeout(t, err)
			break
		}
	}
	e.SetReadDeadline(time.Time{})
}

// With a deadline in the past nothing is moved, and without one all is as before.
func TestPacketPastDeadline(t *testing.T) {
	eachPacketEnd(t, func(t *testing.T, a, b packetEnd) {
		_, err := b.Write([]byte("waits"))
		require.NoError(t, err)
		buf := make([]byte, 10)
		a.SetDeadline(time.Unix(1, 0))
		for range 3 {
			n, err := a.Read(buf)
			require.Zero(t, n)
			requirePacketError(t, err, "read")
			requireTimeout(t, err)
			n, err = a.Write([]byte("not sent"))
			require.Zero(t, n)
			requirePacketError(t, err, "write")
			requireTimeout(t, err)
		}
		a.SetDeadline(time.Time{})
		n, err := a.Read(buf)
		require.NoError(t, err)
		defect.Bytes(t, "waits", buf[:n])
		_, err = a.Write([]byte("sent"))
		require.NoError(t, err)
		n, err = b.Read(buf)
		require.NoError(t, err)
		defect.Bytes(t, "sent", buf[:n])
	})
}

// A Read in progress notices a deadline that is set, one in the future and one that is
// over, and whoever reads beside it.
func TestPacketDeadlines(t *testing.T) {
	eachPacketEnd(t, func(t *testing.T, a, b packetEnd) {
		for _, wait := range []time.Duration{-time.Second, 0, 5 * time.Millisecond, 20 * time.Millisecond} {
			const readers = 3
			errs := make(chan error, readers)
			for range readers {
				go func() {
					_, err := a.Read(make([]byte, 10))
					errs <- err
				}()
			}
			time.Sleep(time.Millisecond)
			a.SetReadDeadline(time.Now().Add(wait))
			within(t, "Read", func() {
				for range readers {
					requireTimeout(t, <-errs)
				}
			})
			// Moved again and again, it holds where it is last.
			for range 10 {
				a.SetReadDeadline(time.Now().Add(time.Hour))
			}
			_, err := b.Write([]byte("x"))
			require.NoError(t, err)
			n, err := a.Read(make([]byte, 10))
			require.NoError(t, err)
			require.Equal(t, 1, n)
			a.SetReadDeadline(time.Time{})
		}
	})
}

// Close ends what is in progress.
func TestPacketCloseUnblocks(t *testing.T) {
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		client, server := pn.pair(t)
		for _, p := range []*PacketConn{client, server} {
			const readers = 3
			errs := make(chan error, readers)
			for range readers {
				go func() {
					_, _, err := p.ReadFrom(make([]byte, 10))
					errs <- err
				}()
			}
			time.Sleep(time.Millisecond)
			within(t, "Close", func() { require.NoError(t, p.Close()) })
			within(t, "Read", func() {
				for range readers {
					err := <-errs
					requirePacketError(t, err, "read")
					require.ErrorIs(t, err, net.ErrClosed)
				}
			})
		}
	})
}

// All methods may be called at once, Close too.
func TestPacketConcurrentMethods(t *testing.T) {
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		client, server := pn.pair(t)
		var wg sync.WaitGroup
		for range 20 {
			for _, e := range []packetEnd{{client, netip.AddrPort{}}, {server, addrPort(client.LocalAddr())}} {
				wg.Go(func() { e.Read(make([]byte, 100)) })
				wg.Go(func() { e.Write(make([]byte, 100)) })
				wg.Go(func() { e.ReadBatch(emptyDatagrams(5, 100)) })
				wg.Go(func() { e.WriteBatch(datagrams(0, 50, e.to)) })
				wg.Go(func() { e.SetDeadline(time.Now().Add(10 * time.Millisecond)) })
				wg.Go(func() { e.SetReadDeadline(time.Now().Add(10 * time.Millisecond)) })
				wg.Go(func() { e.SetWriteDeadline(time.Now().Add(10 * time.Millisecond)) })
				wg.Go(func() { e.LocalAddr(); e.RemoteAddr(); e.MaxDatagramSize() })
				wg.Go(func() { e.Stats(); e.Info() })
			}
		}
		wg.Go(func() { client.Close() })
		wg.Go(func() { client.Close() })
		within(t, "the methods", wg.Wait)
	})
}

// What was written before Close arrives.
func TestPacketCloseSends(t *testing.T) {
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		server := pn.listen(t)
		for range 10 {
			client := pn.dial(t, server.LocalAddr())
			for range 20 {
				_, err := client.Write(pattern(1, 200))
				require.NoError(t, err)
			}
			require.NoError(t, client.Close())
			for range 20 {
				got, _ := readFrom(t, server)
				require.Len(t, got, 200)
			}
		}
	})
}

// Several readers get each datagram once.
func TestPacketManyReaders(t *testing.T) {
	eachPacketEnd(t, func(t *testing.T, a, b packetEnd) {
		const readers = 4
		count := heavy(1000)
		got := make(chan byte, count)
		credits := make(chan struct{}, 16)
		b.SetReadDeadline(time.Now().Add(patience))
		var wg sync.WaitGroup
		for range readers {
			wg.Go(func() {
				buf := make([]byte, 10)
				for {
					n, err := b.Read(buf)
					if err != nil {
						t.Error(err)
						return
					}
					if n == 0 {
						return
					}
					got <- buf[0]
					<-credits
				}
			})
		}
		var want [256]int
		for i := range count {
			credits <- struct{}{}
			want[byte(i)]++
			_, err := a.Write([]byte{byte(i)})
			require.NoError(t, err)
		}
		for range count {
			want[<-got]--
		}
		require.Zero(t, want)
		for range readers {
			_, err := a.Write(nil)
			require.NoError(t, err)
		}
		within(t, "the readers", wg.Wait)
		b.SetReadDeadline(time.Time{})
	})
}
