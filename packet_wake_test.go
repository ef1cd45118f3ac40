package rdmanet

import (
	"fmt"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/fabric"
)

// newSplitFabric has a port of the device for each of two addresses.
func newSplitFabric() *fabric.Fabric {
	fab := fabric.New(fabricMTU, netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.2"), netip.IPv6Loopback())
	fab.Split()
	return fab
}

// One reader hears every port of a device, whichever it is that it waits for.
func TestPacketReaderHearsEveryPort(t *testing.T) {
	checkLeaks(t)
	cfg := Config{Provider: newSwitch(t, newSplitFabric())}
	server := packetNet{network: "udp4", address: ":0", cfg: cfg}.listen(t)
	var clients []*PacketConn
	for _, host := range []string{"127.0.0.1", "127.0.0.2"} {
		to := netip.AddrPortFrom(netip.MustParseAddr(host), server.local.Port())
		clients = append(clients, packetNet{network: "udp4", cfg: cfg}.dial(t, udpAddr(to)))
		_, err := clients[len(clients)-1].Write([]byte(host))
		require.NoError(t, err)
		got, _ := readFrom(t, server)
		require.Equal(t, host, string(got))
	}
	require.Len(t, server.Info(), 2)
	for i := range 20 {
		got := make(chan string)
		go func() {
			var b [10]byte
			server.SetReadDeadline(time.Now().Add(patience))
			n, _, err := server.ReadFrom(b[:])
			got <- fmt.Sprint(string(b[:n]), err)
		}()
		require.True(t, eventually(func() bool {
			server.rmu.Lock()
			defer server.rmu.Unlock()
			l := server.ud.first
			return l.sleeping && !l.kept || server.readers > 0 // who came later than a keeper waits for it
		}))
		_, err := clients[i%2^1].Write([]byte("x"))
		require.NoError(t, err)
		require.Equal(t, "x<nil>", <-got, "round %d", i)
	}
}

// Two datagrams that come at once wake the reader who waits for others, and the one who
// waits for the device.
func TestPacketWakesAllReaders(t *testing.T) {
	onFabric(t, func(t *testing.T, pn packetNet) {
		server := pn.listen(t)
		for range 20 {
			done := make(chan error, 2)
			server.SetReadDeadline(time.Now().Add(patience))
			for range 2 {
				go func() {
					var b [10]byte
					_, _, err := server.ReadFrom(b[:])
					done <- err
				}()
			}
			require.True(t, eventually(func() bool {
				server.rmu.Lock()
				defer server.rmu.Unlock()
				l := server.ud.first
				if waiting := server.readers; l == nil || !l.sleeping || l.kept && waiting != 2 || !l.kept && waiting != 1 {
					return false
				}
				for range 2 { // as received does, with nobody between
					server.deliver(server.local, []byte("x"))
					server.rouse()
				}
				return true
			}))
			require.NoError(t, <-done)
			require.NoError(t, <-done)
		}
	})
}

// What happens while a reader polls is not slept over.
func TestPacketBusyPollNotices(t *testing.T) {
	onFabric(t, func(t *testing.T, pn packetNet) {
		pn.cfg.BusyPoll = 50 * time.Millisecond
		for name, happen := range map[string]func(p *PacketConn){
			"deadline": func(p *PacketConn) { p.readDue.set(time.Now()) },
			"datagram": func(p *PacketConn) { p.deliver(p.local, []byte("x")) },
			"news":     func(p *PacketConn) { p.news = os.ErrInvalid },
		} {
			server := pn.listen(t)
			done := make(chan error, 1)
			go func() {
				var b [10]byte
				_, _, err := server.ReadFrom(b[:])
				done <- err
			}()
			require.True(t, eventually(func() bool {
				server.rmu.Lock()
				defer server.rmu.Unlock()
				l := server.ud.first
				if !l.leading || l.sleeping || l.kept {
					l.recvCQ.Interrupt() // who sleeps makes room for the reader, or is it and polls again
					return false
				}
				time.Sleep(2 * pn.cfg.BusyPoll) // it is over when the reader goes on
				happen(server)
				server.wakeReaders()
				return true
			}), name)
			within(t, "ReadFrom, "+name, func() { <-done })
			require.NoError(t, server.Close())
		}
	})
}
