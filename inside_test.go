package rdmanet

// locked is f with mu held. It is for tests of what nobody can see from outside.
func (c *conn) locked(f func() bool) func() bool {
	return func() bool {
		c.mu.Lock()
		defer c.unlock()
		return f()
	}
}
