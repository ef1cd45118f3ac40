package rdmanet

import (
	"log/slog"
	"runtime"
)

// This file closes connections and listeners that the program drops without Close. The
// public types are handles: goroutines, timers and devices refer only to what is behind
// them. So a handle is garbage as soon as the program has dropped it, and its cleanup
// closes what is behind it. Package net does the same by finalizers. Methods that block
// keep their handle alive until they return. packet.go has the same for a PacketConn.

// newHandle returns the Conn for a connection that is handed out.
func newHandle(c *conn) *Conn {
	h := &Conn{c}
	runtime.AddCleanup(h, (*conn).dropped, c)
	return h
}

// dropped closes a connection whose handle the program has dropped.
func (c *conn) dropped() {
	if c.beginClose() {
		// Neither the log nor the connection may hold up other cleanups.
		go func() {
			warnDropped(c.set.programLog, "connection", "local", c.local, "remote", c.remote)
			c.lingerOn(enterLingering(c))
		}()
	}
}

// newListenerHandle returns the Listener for a listener that is handed out.
func newListenerHandle(l *listener) *Listener {
	h := &Listener{l}
	runtime.AddCleanup(h, (*listener).dropped, l)
	return h
}

// dropped closes a listener whose handle the program has dropped.
func (l *listener) dropped() {
	l.mu.Lock()
	over := l.over
	l.mu.Unlock()
	if over {
		return
	}
	go func() {
		warnDropped(l.cfg.Logger, "listener", "local", l.addr)
		l.close()
	}()
}

// warnDropped logs that the program has dropped something without Close. A nil log means
// slog.Default(): memory and descriptors were in use until now, so the warning must be
// seen.
func warnDropped(log *slog.Logger, what string, args ...any) {
	if log == nil {
		log = slog.Default()
	}
	log.Warn("rdmanet: "+what+" dropped without Close; the garbage collector closes it", args...)
}
