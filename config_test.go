package rdmanet

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/scripted"
)

// What is out of range is refused by Dial and by Listen, by name.
func TestConfigRange(t *testing.T) {
	for _, f := range []struct {
		name   string
		field  func(*Config) *int
		lo, hi int
	}{
		{"MaxSendSize", func(c *Config) *int { return &c.MaxSendSize }, 256, 1 << 20},
		{"MaxReceiveSize", func(c *Config) *int { return &c.MaxReceiveSize }, 256, 1 << 20},
		{"MaxFragmentedSize", func(c *Config) *int { return &c.MaxFragmentedSize }, 131080, 1 << 30},
		{"InitialReceiveCredits", func(c *Config) *int { return &c.InitialReceiveCredits }, minCredits, 255},
		{"MaxReceiveCredits", func(c *Config) *int { return &c.MaxReceiveCredits }, minCredits, 255},
		{"ReceiveMemory", func(c *Config) *int { return &c.ReceiveMemory }, 64 << 10, maxReceiveMemory},
		{"TransferMemory", func(c *Config) *int { return &c.TransferMemory }, 256 << 10, 1 << 30},
		{"SendCreditTarget", func(c *Config) *int { return &c.SendCreditTarget }, minCredits, 255},
	} {
		for _, v := range []int{0, f.lo, f.hi} {
			var c Config
			*f.field(&c) = v
			require.NoError(t, c.check(), "%s %d", f.name, v)
		}
		for _, v := range []int{-1, 1, f.lo - 1, f.hi + 1} {
			var c Config
			*f.field(&c) = v
			_, err := (&Dialer{Config: c}).Dial("rdma4", "127.0.0.1:1")
			requireOpError(t, transports[0], err, "dial")
			require.ErrorContains(t, err, "Config."+f.name)
			_, err = (&ListenConfig{Config: c}).Listen(tctx, "rdma4", local4)
			requireOpError(t, transports[0], err, "listen")
			require.ErrorContains(t, err, "Config."+f.name)
		}
	}
	err := (&Config{MaxSendSize: 1, MaxReceiveCredits: 1}).check()
	require.ErrorContains(t, err, "MaxSendSize")
	require.ErrorContains(t, err, "MaxReceiveCredits")
}

func TestConfigDefaults(t *testing.T) {
	device := func(pins bool) settings {
		devs, err := newModest(t, 0, 100, pins).Devices()
		require.NoError(t, err)
		return new(Config).settings(devs[0], false)
	}
	for _, pins := range []bool{false, true} {
		s := device(pins)
		segment := 65560
		if pins {
			segment = 8192
		}
		require.Equal(t, segment, s.maxSend)
		require.Equal(t, segment, s.maxReceive)
		require.Equal(t, 1<<20, s.maxFragmented)
		require.Equal(t, 4, s.initial)
		require.Equal(t, min(255, 4<<20/segment), s.maximum)
		require.Equal(t, 255, s.target)
		require.Equal(t, 64<<20, s.transferMemory)
		require.Equal(t, 120*time.Second, s.keepAlive)
		require.Equal(t, 20*time.Second, s.probe)
		require.Equal(t, 5*time.Second, s.linger)
		require.Equal(t, 120*time.Second, s.negotiate)
	}
	devs, err := newModest(t, 0, 100, true).Devices()
	require.NoError(t, err)
	s := (&Config{InitialReceiveCredits: 10, MaxReceiveCredits: 5, KeepAlive: time.Second}).settings(devs[0], true)
	require.Equal(t, 5, s.initial, "no more than the maximum")
	require.Equal(t, time.Second, s.probe, "no more than KeepAlive")
	require.Equal(t, 20*time.Second, s.negotiate, "the passive side waits less")
	require.EqualValues(t, plainSegment, s.limits(privateData{}).maxSend, "for peers that may be Windows")
	require.EqualValues(t, pinnedSegment, s.limits(privateData{rdmanet: true}).maxSend)
}

// What is negotiated is the smaller of both sides' wishes, each way.
func TestConfigNegotiated(t *testing.T) {
	checkLeaks(t)
	client, server := pipe(t, "rdma4", local4,
		&ListenConfig{Config: Config{MaxSendSize: 1000, MaxReceiveSize: 2000, MaxFragmentedSize: 300000, TransferSize: -1}},
		&Dialer{Config: Config{MaxSendSize: 5000, MaxReceiveSize: 800, MaxFragmentedSize: 200000}})
	require.LessOrEqual(t, client.Info().MaxSendSize, 2000)
	require.LessOrEqual(t, server.Info().MaxSendSize, 800)
	require.Equal(t, 300000, client.MaxMessageSize())
	require.Equal(t, 200000, server.MaxMessageSize())
	require.True(t, client.Info().Extensions.HalfClose)
	require.Equal(t, testDevice(t).Attr().Transport.String(), client.Info().Transport)
	require.Equal(t, client.Info().LocalGID, server.Info().RemoteGID)
	require.NotZero(t, client.Info().MTU)
	require.Contains(t, client.String(), client.RemoteAddr().String())
	exchange(t, client, server, 300<<10)
	require.NoError(t, client.Close())
	require.NoError(t, server.Close())
}

// Polling for completions changes nothing but time.
func TestBusyPoll(t *testing.T) {
	checkLeaks(t)
	client, server := pipeOn(t, Config{BusyPoll: 100 * time.Microsecond})
	for range 10 {
		exchange(t, client, server, heavy(100<<10))
	}
	require.NoError(t, client.SetReadDeadline(time.Now().Add(time.Millisecond)))
	_, err := client.Read(make([]byte, 1))
	requireTimeout(t, err)
	require.NoError(t, client.Close())
	require.NoError(t, server.Close())
}

// Who polls although a deadline has passed, or the connection is closed, keeps
// nobody from it: the timers of what it waits for among them.
func TestBusyPollLetsOthersIn(t *testing.T) {
	checkLeaks(t)
	const ages = time.Hour
	t.Run("keeper", func(t *testing.T) {
		dev := scripted.New(newProvider(t))
		client, server := pipeOn(t, Config{Provider: dev, BusyPoll: ages})
		e := dev.Endpoint(client.Info().QPN)
		exchange(t, client, server, 100)
		require.NoError(t, client.SetReadDeadline(past))
		within(t, "the keeper", func() {
			require.True(t, eventually(e.Asleep))
			require.NoError(t, client.Close())
			require.NoError(t, server.Close())
		})
	})

	setWithdrawWithin(t, 10*time.Millisecond)
	for name, end := range map[string]func(c *Conn){
		"deadline": func(c *Conn) { c.SetWriteDeadline(past) },
		"Close":    func(c *Conn) { c.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t)
			s.cfg.BusyPoll, s.cfg.LingerTimeout = ages, 10*time.Millisecond
			c, p := s.transferConns(true, true)
			wrote := writing(c, make([]byte, 100000))
			p.ExpectBegin(true)
			within(t, "the end", func() {
				end(c)
				require.Error(t, (<-wrote).err)
				c.Close()
			})
		})
	}
	t.Run("linger", func(t *testing.T) {
		m := newModest(t, 1<<20, 1<<14, false)
		m.mute = true // so there is nothing but the time
		s := newSceneOn(t, m)
		s.cfg.BusyPoll, s.cfg.LingerTimeout = ages, 10*time.Millisecond
		c, _ := s.transferConns(true, true)
		within(t, "Close", func() { require.NoError(t, c.Close()) })
	})
}

// The logger hears of what breaks.
func TestLogger(t *testing.T) {
	checkLeaks(t)
	var log bytes.Buffer
	cfg := Config{Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))}
	_, err := (&Dialer{Config: cfg}).Dial("rdma4", freePort(t, transports[0]))
	require.Error(t, err)
	require.Equal(t, 1, strings.Count(log.String(), "dial failed"))
	require.Contains(t, log.String(), "refused")
}

// The counters of both ends agree with each other and with what was done.
func TestStats(t *testing.T) {
	checkLeaks(t)
	client, server := pipeOn(t, Config{TransferSize: -1})
	size := heavy(4 << 20)
	exchange(t, client, server, size)
	for _, s := range [][2]Stats{{client.Stats(), server.Stats()}, {server.Stats(), client.Stats()}} {
		sent, got := s[0], s[1]
		require.EqualValues(t, size, sent.BytesSent)
		require.EqualValues(t, size, got.BytesReceived)
		require.Equal(t, sent.SegmentsSent, got.SegmentsReceived)
		require.Equal(t, sent.MessagesSent, got.MessagesReceived)
		require.GreaterOrEqual(t, sent.SegmentsSent, uint64(size/pagedSegment))
		require.LessOrEqual(t, sent.MessagesSent, sent.SegmentsSent)
		require.LessOrEqual(t, sent.Posts, sent.SegmentsSent+sent.EmptySent)
		require.LessOrEqual(t, sent.Signaled, sent.SegmentsSent+sent.EmptySent)
		require.NotZero(t, sent.Signaled)
		require.GreaterOrEqual(t, got.BytesCopied, uint64(size), "read copies")
		require.GreaterOrEqual(t, sent.SendCredits, 0)
		require.LessOrEqual(t, got.ReceiveCredits, creditCeiling+1, "a window of large receives is smaller than what was posted before")
	}
	require.NoError(t, client.Close())
	require.NoError(t, server.Close())
}
